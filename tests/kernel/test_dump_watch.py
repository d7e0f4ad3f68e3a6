"""`ebpfproxy dump --watch` as a process that reads real maps: its lines, and its end."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from socket import htons

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.errors import CLOSED
from ebpfproxy.model.address import parse_address
from tests.support.bpf_place import BpfPlace, bpf_place, build_maps
from tests.support.kustomize import REPOSITORY

pytestmark = pytest.mark.kernel

_SIZES = MapSizes(services=64, slots=16, endpoints=16, affinity=8, sockets=8)


@pytest.fixture
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        build_in(made, "programs-watch")
        yield made


def build_in(place: BpfPlace, name: str) -> None:
    folder = build_maps(place, _SIZES, name)
    Pins(place.bpffs).set_current(folder.parent)


def put_frontend(place: BpfPlace, name: str, number: int, flags: int = 0) -> None:
    """Write a frontend without endpoints."""
    with contextlib.closing(Maps(place.bpffs / name / "maps")) as maps:
        maps["services"].update(_key(number), abi.SERVICE.pack(bytes(8), bytes(8), number, 0, flags, 1, 0, 0))


def remove_frontend(place: BpfPlace, name: str, number: int) -> None:
    with contextlib.closing(Maps(place.bpffs / name / "maps")) as maps:
        maps["services"].delete(_key(number))


def _key(number: int) -> bytes:
    return abi.SERVICE_KEY.pack(parse_address(f"10.96.0.{number}"), htons(80), 6, 0)


@contextlib.contextmanager
def watching(place: BpfPlace, *arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "ebpfproxy", "dump", "--watch", "--interval=0.05"]
    process = subprocess.Popen(
        [*command, f"--bpffs-root={place.bpffs}", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        assert process.stderr
        pytest.fail(process.stderr.read())
    return line


def test_changes_are_shown_until_an_interrupt(place: BpfPlace) -> None:
    put_frontend(place, "programs-watch", 1)
    with watching(place, "-o", "json") as process:
        first = json.loads(_line(process))
        assert (first["change"], first["row"]["address"]) == ("initial", "10.96.0.1")
        put_frontend(place, "programs-watch", 2)
        assert json.loads(_line(process))["change"] == "added"
        put_frontend(place, "programs-watch", 2, abi.SERVICE_REJECT)
        changed = json.loads(_line(process))
        assert (changed["previous"], changed["row"]["flags"]) == ({"flags": []}, ["reject"])
        remove_frontend(place, "programs-watch", 1)
        removed = json.loads(_line(process))
        assert (removed["change"], removed["row"]["address"]) == ("removed", "10.96.0.1")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        assert process.stderr
        assert process.stderr.read() == ""


def test_a_table_is_followed_by_lines(place: BpfPlace) -> None:
    with watching(place) as process:
        assert _line(process) == "services: none\n"
        put_frontend(place, "programs-watch", 2)
        assert " + services " in (line := _line(process))
        assert "address=10.96.0.2" in line
        assert "\x1b" not in line


def test_maps_that_the_agent_replaces_are_followed(place: BpfPlace) -> None:
    put_frontend(place, "programs-watch", 1)
    with watching(place, "-o", "json") as process:
        _line(process)
        Pins(place.bpffs).current.unlink()
        build_in(place, "programs-watch2")
        assert json.loads(_line(process))["change"] == "removed"
        put_frontend(place, "programs-watch2", 3)
        assert json.loads(_line(process))["row"]["address"] == "10.96.0.3"


def test_it_ends_if_its_output_is_closed(place: BpfPlace) -> None:
    with watching(place, "-o", "json") as process:
        put_frontend(place, "programs-watch", 1)
        _line(process)
        assert process.stdout
        process.stdout.close()
        put_frontend(place, "programs-watch", 2)
        assert process.wait() == CLOSED
        assert process.stderr
        assert process.stderr.read() == ""
        process.stdout = None


@pytest.mark.parametrize(
    ("environment", "colored"), [({"NO_COLOR": "", "TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False)]
)
def test_lines_have_colors_on_a_terminal_unless_no_color_is_set(
    place: BpfPlace, environment: dict[str, str], colored: bool
) -> None:
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "ebpfproxy", "dump", "-w", "--interval=0.05"]
    process = subprocess.Popen(
        [*command, f"--bpffs-root={place.bpffs}"],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=inner,
    )
    try:
        shown = os.read(terminal, 4096)
        put_frontend(place, "programs-watch", 1)
        while b"10.96.0.1" not in shown:
            shown += os.read(terminal, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(inner)
        os.close(terminal)
    assert (b"\x1b[3" in shown) == colored
