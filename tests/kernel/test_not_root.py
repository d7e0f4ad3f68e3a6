"""Errors of the commands for users other than root."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ebpfproxy import cli
from ebpfproxy.lab.agent import LogLine
from tests.support.bpf_place import ARRAY, bpf_place, create_map
from tests.support.confined import as_nobody

pytestmark = pytest.mark.kernel


def python_as_nobody(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*as_nobody(), sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "command", ["dump", "cleanup", "run --cleanup", "run --healthz-port=0 --metrics-port=0"]
)
def test_an_unreadable_bpffs_is_reported_with_the_hint_to_run_as_root(command: str) -> None:
    with bpf_place() as place, tempfile.TemporaryDirectory() as manifests:
        Path(manifests).chmod(0o755)
        flags = [f"--bpffs-root={place.bpffs}/agent"]
        if command.startswith("run"):
            flags += [f"--manifests={manifests}", f"--cgroup-root={place.cgroup}"]
        done = python_as_nobody("-m", "ebpfproxy", *command.split(), *flags)
    assert done.returncode == 4, done.stderr
    if command.startswith("run"):
        line = LogLine(0.0, done.stderr.splitlines()[-1])
        assert cli.ENDED in line.text
        message, hint = line.values["error"], line.values["hint"]
    else:
        *_, message, hint = done.stderr.splitlines()
        assert message.startswith("ebpfproxy: ")
        hint = hint.removeprefix("  hint: ")
    assert hint == "run as root"
    assert str(place.bpffs) in message
    assert done.stdout == ""


_OPEN = """
import sys
from pathlib import Path
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.bpf.bpf import Map
try:
    Map.pinned(Path(sys.argv[1]))
except Rejected as failure:
    print(failure.hint)
"""


def test_a_pin_that_cannot_be_opened_is_reported_with_the_hint_to_run_as_root() -> None:
    with bpf_place() as place:
        place.bpffs.chmod(0o755)
        pinned = create_map(ARRAY, 4, 4, 1)
        pinned.pin(place.bpffs / "one")
        pinned.close()
        done = python_as_nobody("-c", _OPEN, str(place.bpffs / "one"))
    assert done.stdout.startswith("run as root"), done.stderr
