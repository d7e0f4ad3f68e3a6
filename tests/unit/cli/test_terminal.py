"""Colors and progress: on terminals only. Each program runs in a process of its own, on a real terminal."""

import contextlib
import io
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

import ebpfproxy
from ebpfproxy.cli.terminal import has_colors

TABLE = """
from ebpfproxy.cli.terminal import console
console().print("word", style="bold red")
"""
PROGRESS = """
from ebpfproxy.cli.terminal import progress
with progress("compiling"):
    pass
print("result")
"""
STEPS = """
from ebpfproxy.cli.terminal import steps
with steps() as show:
    show("round 1 of 2", 0.0)
    show("[errors]")
    show("round 2 of 2", 0.5)
print("result")
"""
ESCAPE = "\x1b"


def run(
    program: str, environment: Mapping[str, str] = MappingProxyType({}), *, stdout_is_terminal: bool = True
) -> tuple[str, str]:
    """What a program writes to a terminal of 80 columns, which is its standard error, and to standard output
    if that is a pipe."""
    known = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=slave,
        stdout=slave if stdout_is_terminal else subprocess.PIPE,
        stderr=slave,
        env={**known, "COLUMNS": "80", **environment},
        text=True,
    ) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the process has ended
            while piece := os.read(master, 4096):
                shown += piece
        os.close(master)
        piped = process.stdout.read() if process.stdout else ""
    assert process.returncode == 0, shown.decode()
    return shown.decode(), piped


def test_a_terminal_gets_colors() -> None:
    assert run(TABLE)[0] == f"{ESCAPE}[1;31mword{ESCAPE}[0m\r\n"


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "unknown"}])
def test_no_color_and_dumb_terminals_get_plain_text(environment: Mapping[str, str]) -> None:
    assert run(TABLE, environment)[0] == "word\r\n"


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}])
def test_a_pipe_gets_plain_text_even_if_the_environment_asks_for_colors(
    environment: Mapping[str, str],
) -> None:
    assert run(TABLE, environment, stdout_is_terminal=False) == ("", "word\n")


def test_an_empty_no_color_has_no_effect() -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    assert has_colors(terminal, {"NO_COLOR": "", "TERM": "xterm"})
    assert not has_colors(terminal, {"NO_COLOR": "0", "TERM": "xterm"})


def test_progress_is_shown_on_the_terminal_and_not_in_the_result() -> None:
    shown, piped = run(PROGRESS, stdout_is_terminal=False)
    assert "compiling" in shown
    assert piped == "result\n"


def test_progress_disappears_before_the_result() -> None:
    shown, _ = run(PROGRESS)
    after = shown[shown.rindex("compiling") :]
    assert f"{ESCAPE}[2K" in after, "the line is erased"
    assert after.endswith("result\r\n")


def test_without_a_terminal_there_is_no_progress() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("result\n", "")


def test_the_steps_of_a_long_command_show_the_part_that_is_done() -> None:
    shown, piped = run(STEPS, stdout_is_terminal=False)
    for text in ("round 1 of 2\r\n", "[errors]\r\n", "round 2 of 2\r\n", "50%", "left"):
        assert text in shown
    assert piped == "result\n"


def test_without_a_terminal_the_steps_are_lines() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("result\n", "round 1 of 2\n[errors]\nround 2 of 2\n")


def test_every_console_is_made_in_one_place() -> None:
    package = Path(ebpfproxy.__file__).parent
    places = [path.name for path in package.rglob("*.py") if "import Console\n" in path.read_text()]
    assert set(places) == {"terminal.py"}
