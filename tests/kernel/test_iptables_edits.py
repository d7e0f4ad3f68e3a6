"""Edits of iptables-legacy rules that change no sizes: detected after a use of the tools (lock file)."""

import socket
import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.iptables.families import LegacyEdits
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables import legacy
from ebpfproxy.model.address import Family

pytestmark = pytest.mark.kernel

STEMS = {Family.IPV4: "iptables-legacy -w", Family.IPV6: "ip6tables-legacy -w"}
ROOM = 1 << 20


@pytest.fixture(autouse=True)
def nowhere() -> Iterator[None]:
    """The calling thread is in a new network namespace with loopback up and two chains of rules."""
    with netns.throw_away():
        run("ip link set lo up")
        for stem in STEMS.values():
            run(f"{stem} -N USER")
            run(f"{stem} -A USER -p udp --dport 53 -m comment --comment one -j ACCEPT")
            run(f"{stem} -A OUTPUT -j USER")
        yield


@pytest.fixture(params=list(Family), ids=lambda of: of.value)
def of(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


def run(command: str) -> str:
    return subprocess.run(command.split(), capture_output=True, text=True, check=True, timeout=60).stdout


def digest(of: Family, largest: int = ROOM) -> int:
    return legacy.digest(of, "filter", largest)


def replace(of: Family, port: int) -> None:
    run(f"{STEMS[of]} -R USER 1 -p udp --dport {port} -m comment --comment one -j ACCEPT")


def test_an_edited_value_changes_the_digest(of: Family) -> None:
    before, sizes = digest(of), legacy.fingerprint(of, "filter")
    assert before
    replace(of, 54)
    assert digest(of) != before
    assert legacy.fingerprint(of, "filter") == sizes
    replace(of, 53)
    assert digest(of) == before


def test_counters_do_not_change_the_digest(of: Family) -> None:
    before = digest(of)
    number, address = {Family.IPV4: (socket.AF_INET, "127.0.0.1"), Family.IPV6: (socket.AF_INET6, "::1")}[of]
    with socket.socket(number, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"?", (address, 53))
    counted = run(f"{STEMS[of]} -v -S OUTPUT")
    assert "-c 0 0 -j USER" not in counted
    assert digest(of) == before


def test_an_unused_or_too_large_table_has_no_digest(of: Family) -> None:
    assert legacy.digest(of, "raw", ROOM) == 0
    assert digest(of, 100) == 0
    assert "raw" not in legacy.tables(of)


def counted(edits: LegacyEdits, moments: list[float]) -> int:
    """The count at a later moment than all previous calls."""
    moments[0] += 100.0
    return edits.count()


def test_only_foreign_edits_are_counted(of: Family) -> None:
    moments = [0.0]
    edits = LegacyEdits(list(Family), ["filter", "nat"], clock=lambda: moments[0])
    try:
        assert counted(edits, moments) == 0
        replace(of, 54)
        assert counted(edits, moments) == 1
        run(f"{STEMS[of]} -S")  # also takes the lock
        assert counted(edits, moments) == 1
        replace(of, 55)
        edits.settle()
        assert edits.count() == counted(edits, moments) == 1
        replace(of, 56)
        assert counted(edits, moments) == 2
    finally:
        edits.close()
        edits.close()


def test_tables_are_compared_only_after_a_use_of_the_tools() -> None:
    moments, compared = [0.0], []

    def compare(family: Family, table: str, largest: int) -> int:
        compared.append(table)
        moments[0] += 1.0  # each comparison takes a second
        return 1

    edits = LegacyEdits([Family.IPV4], ["filter"], clock=lambda: moments[0], digest=compare)
    try:
        edits.count()
        assert compared == ["filter"]
        run("iptables-legacy -w -S")
        moments[0] += 9.0
        edits.count()
        assert compared == ["filter"], "comparisons take at most a tenth of the time"
        moments[0] += 1.0
        edits.count()
        assert compared == ["filter"] * 2
    finally:
        edits.close()
