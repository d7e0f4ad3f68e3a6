"""Standard error: every line has the format of the log, also those of Python and of libraries."""

import json
import re
import signal
import subprocess
import sys

import pytest

TEXT = re.compile(
    r"[-0-9]{10}T[:0-9]{8}\.\d{3}Z (INFO|WARNING|ERROR) [A-Z][A-Za-z ]+"
    r'( [a-z_]+=("(\\.|[^"\\])*"|\S+))*'
)
_BUGS = ["Unexpected error thread="] * 3
NOISE = """
import logging, sys, threading, urllib3, warnings
from ebpfproxy import log
log.set_up(0, sys.argv[1])
log.capture()
library = logging.getLogger("urllib3.connectionpool")
library.warning("Retrying (%s)\\nafter %r", "Retry(total=2)", OSError("no"))
warnings.warn("Unverified HTTPS request", urllib3.exceptions.InsecureRequestWarning)
def fail():
    raise ValueError("in a thread")
thread = threading.Thread(target=fail, name="broken")
thread.start()
thread.join()
class Unraisable:
    def __del__(self):
        raise KeyError("in a destructor")
del_me = Unraisable()
del del_me
raise ZeroDivisionError("in the main thread")
"""


def noise(style: str) -> list[str]:
    ended = subprocess.run([sys.executable, "-c", NOISE, style], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    return ended.stderr.splitlines()


def test_each_line_of_text_has_the_format_of_the_log() -> None:
    lines = noise("text")
    assert [line for line in lines if not TEXT.fullmatch(line)] == []
    expected = [
        "Message of a library logger=",
        "Warning of a library category=",
        *["Unexpected error thread="] * 3,
    ]
    assert [found for found, line in zip(expected, lines, strict=True) if found not in line] == []
    assert "InsecureRequestWarning" in lines[1]
    assert "thread=broken" in lines[2]


def test_each_line_of_json_is_an_object_with_the_values() -> None:
    entries = [json.loads(line) for line in noise("json")]
    assert [entry["msg"] for entry in entries[:2]] == ["Message of a library", "Warning of a library"]
    assert entries[0]["text"] == "Retrying (Retry(total=2))\nafter OSError('no')"
    assert [entry["error"] for entry in entries[2:]] == [
        "ValueError('in a thread')",
        "KeyError('in a destructor')",
        "ZeroDivisionError('in the main thread')",
    ]
    assert all(entry["traceback"].startswith("Traceback (most recent call last)") for entry in entries[2:])


def test_after_a_fatal_signal_the_stacks_are_printed() -> None:
    program = (
        "import os; from ebpfproxy import log; log.set_up(0, 'text'); log.capture(); os.kill(os.getpid(), 11)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV
    assert "most recent call first" in ended.stderr


@pytest.mark.parametrize("text", ["a b", 'say "x"', "a=b", "two\nlines", ""])
def test_a_value_stays_one_word(text: str) -> None:
    program = (
        f"from ebpfproxy import log; log.set_up(0, 'text'); log.Logger('ebpfproxy').info('A', text={text!r})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = ended.stderr.splitlines()
    assert json.loads(line.partition("text=")[2]) == text
