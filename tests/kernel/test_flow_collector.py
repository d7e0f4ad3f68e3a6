"""The collector's thread on real maps."""

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import IPPROTO_UDP, htons

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows import collector as flow_collector
from ebpfproxy.backends.ebpf.flows import sweep
from ebpfproxy.backends.ebpf.flows.collector import COLLECT_FAILED, PODS_UNREAD, FlowCollector
from ebpfproxy.backends.ebpf.flows.state import FlowTimeouts
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import parse_address
from tests.support.bpf_place import bpf_place, build_maps
from tests.support.flows import ENDPOINT, NS, a_flow, endpoints, entries, reply_entries, write

pytestmark = pytest.mark.kernel

_SIZES = MapSizes(services=8, slots=16, endpoints=64, affinity=8, sockets=8, flows=65536, source_ranges=8)
_U32 = struct.Struct("=I")
FLOWS = "flows", "replies"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with bpf_place() as place:
        yield build_maps(place, _SIZES, "v1-flows")


@pytest.fixture
def maps(folder: Path) -> Iterator[Maps]:
    """Empty, but for the endpoint of `a_flow`."""
    with contextlib.closing(Maps(folder)) as opened:
        for name in (*FLOWS, "bypassing", "netfilter_flows"):
            for key, _ in list(opened[name].items()):
                opened[name].delete(key)
        listed(opened, abi.ENDPOINT_LISTED)
        yield opened


def listed(maps: Maps, flags: int) -> None:
    at = ENDPOINT * abi.ENDPOINT.size
    packed = bytes(endpoints(flags)[at : at + abi.ENDPOINT.size])
    maps["endpoints"].update(_U32.pack(ENDPOINT), packed)


@pytest.fixture
def started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[frozenset[int]], object]], FlowCollector]]:
    """A collector that looks all the time, for which a closed TCP connection is over in a second."""
    monkeypatch.setattr(flow_collector, "_POLL", 0.01)
    monkeypatch.setattr(flow_collector, "_SHORTEST", 0.01)
    monkeypatch.setattr(flow_collector, "_LONGEST", 0.01)
    running = []

    def start(
        pods_bypass: Callable[[frozenset[int]], object] = lambda seen: None,
        note: Callable[[bool], object] = lambda present: None,
    ) -> FlowCollector:
        running.append(FlowCollector(folder, FlowTimeouts(tcp_fin=1), pods_bypass, note))
        return running[-1]

    yield start
    for each in running:
        each.close()


Start = Callable[..., FlowCollector]


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def contents(of: Map) -> dict[bytes, bytes]:
    return dict(of.items())


def test_flows_that_are_over_are_removed_and_the_others_are_not(maps: Maps, started: Start) -> None:
    long_ago = time.monotonic_ns() - 4 * NS
    over = [a_flow(n, flags=abi.FLOW_RESET, last_seen=long_ago, masquerade="10.0.0.1") for n in range(500)]
    alive = [a_flow(n, last_seen=long_ago) for n in range(1000, 1500)]
    half_open = [a_flow(n, last_seen=long_ago, half_open=True) for n in range(2000, 2010)]
    write(maps, *over, *alive, *half_open)
    collector = started()
    eventually(lambda: collector.collected().expired == len(over))
    eventually(lambda: collector.collected()[:2] == (len(alive), len(half_open)))
    assert [contents(maps[name]) for name in FLOWS] == [
        entries(*alive, *half_open),
        reply_entries(*alive, *half_open),
    ]
    assert maps["established_flows"].lookup(_U32.pack(0)) == _U32.pack(len(alive))


def test_a_reply_whose_flow_is_gone_is_removed_when_it_is_over(maps: Maps, started: Start) -> None:
    alive, over = a_flow(1, last_seen=time.monotonic_ns()), a_flow(2, flags=abi.FLOW_RESET)
    maps["replies"].update_all(list(reply_entries(alive, over).items()))
    collector = started()
    eventually(lambda: collector.collected().orphaned == 1)
    assert contents(maps["replies"]) == reply_entries(alive)


def test_udp_flows_go_when_their_endpoint_is_retired(maps: Maps, started: Start) -> None:
    write(maps, a_flow(1, IPPROTO_UDP, abi.FLOW_REPLIED, time.monotonic_ns()))
    collector = started()
    eventually(lambda: collector.collected().entries == 1)
    listed(maps, abi.ENDPOINT_ON_NODE)
    eventually(lambda: collector.collected().retired == 1)
    assert [contents(maps[name]) for name in ("flows", "replies")] == [{}, {}]


def test_when_netfilters_last_flow_is_gone_that_is_noted(maps: Maps, started: Start) -> None:
    """Conntrack has none with these addresses."""
    a, b = parse_address("192.0.2.1"), parse_address("192.0.2.2")
    key = abi.FLOW_KEY.pack(a, b, htons(80), htons(4000), IPPROTO_UDP, abi.AT_INGRESS, 0)
    maps["netfilter_flows"].update(key, bytes(4))
    noted: list[bool] = []
    started(note=noted.append)
    eventually(lambda: noted == [True, False])
    assert contents(maps["netfilter_flows"]) == {}


def test_pods_that_bypass_are_told_of_once_and_again_when_there_are_more(maps: Maps, started: Start) -> None:
    told: list[frozenset[int]] = []
    maps["bypassing"].update(_U32.pack(17), bytes(8))
    collector = started(told.append)
    eventually(lambda: told)
    maps["bypassing"].update(_U32.pack(23), bytes(8))
    eventually(lambda: len(told) > 1)
    collector.close()
    assert told == [{17}, {17, 23}]


def test_an_error_of_the_listener_does_not_end_the_thread(
    maps: Maps, started: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is told again, as it has not taken in what it was told."""
    asked = threading.Semaphore(0)

    def reject(seen: frozenset[int]) -> None:
        asked.release()
        raise ValueError("what was not foreseen")

    maps["bypassing"].update(_U32.pack(17), bytes(8))
    with caplog.at_level(logging.ERROR):
        started(reject)
        assert asked.acquire(timeout=20)
        assert asked.acquire(timeout=20)
    assert PODS_UNREAD in caplog.messages


def test_an_error_of_a_walk_does_not_end_the_thread(
    maps: Maps, started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = sweep.FlowSweep.run
    failures = [OSError(24, "too many files"), ValueError("what was not foreseen")]

    def failing(sweep: sweep.FlowSweep, rest: Callable[[float], bool]) -> sweep.Swept:
        if failures:
            raise failures.pop()
        return run(sweep, rest)

    monkeypatch.setattr(sweep.FlowSweep, "run", failing)
    write(maps, a_flow(flags=abi.FLOW_RESET))
    with caplog.at_level(logging.ERROR):
        collector = started()
        eventually(lambda: collector.collected().expired == 1)
    assert caplog.messages.count(COLLECT_FAILED) == 2


def test_an_end_does_not_wait_for_the_walk(
    maps: Maps, started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It rests after every batch: all of them together would take hours here."""
    monkeypatch.setattr(flow_collector, "_REST_FACTOR", 10**9)
    monkeypatch.setattr(flow_collector, "_LONGEST_REST", 60.0)
    monkeypatch.setattr(flow_collector, "_PATIENCE", 50.0)
    now = time.monotonic_ns()
    maps["flows"].update_all(list(entries(*(a_flow(n, last_seen=now) for n in range(30_000))).items()))
    resting = threading.Event()
    rest = FlowCollector._rest

    def noted(collector: FlowCollector, worked: float) -> bool:
        resting.set()
        return rest(collector, worked)

    monkeypatch.setattr(FlowCollector, "_rest", noted)
    collector = started()
    assert resting.wait(20)
    collector.close()
    assert "not waiting" not in caplog.text
