"""The flow collector's thread with real maps."""

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
        yield build_maps(place, _SIZES, "programs-flows")


@pytest.fixture
def maps(folder: Path) -> Iterator[Maps]:
    """Maps that are empty except for the endpoint of `a_flow`."""
    with contextlib.closing(Maps(folder)) as opened:
        for name in (*FLOWS, "bypassing", "netfilter_flows"):
            for key, _ in list(opened[name].items()):
                opened[name].delete(key)
        set_endpoint_flags(opened, abi.ENDPOINT_LISTED)
        yield opened


def set_endpoint_flags(maps: Maps, flags: int) -> None:
    at = ENDPOINT * abi.ENDPOINT.size
    packed = bytes(endpoints(flags)[at : at + abi.ENDPOINT.size])
    maps["endpoints"].update(_U32.pack(ENDPOINT), packed)


@pytest.fixture
def started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[frozenset[int]], object]], FlowCollector]]:
    """Starts collectors that poll continuously, with a timeout of one second for closed TCP connections."""
    monkeypatch.setattr(flow_collector, "_POLL", 0.01)
    monkeypatch.setattr(flow_collector, "_SHORTEST", 0.01)
    monkeypatch.setattr(flow_collector, "_LONGEST", 0.01)
    monkeypatch.setattr(flow_collector, "_CROWDED_SHORTEST", 0.01)
    running = []

    def start(
        pods_bypass: Callable[[frozenset[int]], object] = lambda seen: None,
        note: Callable[[bool], object] = lambda present: None,
        tcp_fin: int = 1,
    ) -> FlowCollector:
        running.append(FlowCollector(folder, FlowTimeouts(tcp_fin=tcp_fin), pods_bypass, note))
        return running[-1]

    yield start
    for each in running:
        each.close()


Start = Callable[..., FlowCollector]


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true within 20 s"
        time.sleep(0.005)


def contents(of: Map) -> dict[bytes, bytes]:
    return dict(of.items())


def test_only_expired_flows_are_removed(maps: Maps, started: Start) -> None:
    long_ago = max(0, time.monotonic_ns() - 4 * NS)  # the kernel in user mode may have just booted
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


@pytest.mark.parametrize("kind", [abi.FLOWS_OF_TCP, abi.FLOWS_OF_OTHERS])
def test_closed_flows_are_removed_earlier_and_at_once_while_established_flows_are_many(
    maps: Maps, started: Start, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs count them: the map need not be full for this test."""
    monkeypatch.setattr(flow_collector, "_SHORTEST", 1000.0)
    a_while_ago = time.monotonic_ns() - 15 * NS
    closed = [a_flow(n, flags=abi.FLOW_RESET, last_seen=a_while_ago) for n in range(100)]
    alive = a_flow(1000, last_seen=a_while_ago)
    write(maps, *closed, alive)
    collector = started(tcp_fin=10_000)
    maps["established_flows"].update(_U32.pack(kind), _U32.pack(maps["flows"].shape.max_entries // 2))
    eventually(lambda: collector.collected().expired == len(closed))
    assert contents(maps["flows"]) == entries(alive)


def test_an_expired_reply_entry_without_flow_is_removed(maps: Maps, started: Start) -> None:
    alive, over = a_flow(1, last_seen=time.monotonic_ns()), a_flow(2, flags=abi.FLOW_RESET)
    maps["replies"].update_all(list(reply_entries(alive, over).items()))
    collector = started()
    eventually(lambda: collector.collected().orphaned == 1)
    assert contents(maps["replies"]) == reply_entries(alive)


def test_udp_flows_are_removed_with_their_endpoint(maps: Maps, started: Start) -> None:
    write(maps, a_flow(1, IPPROTO_UDP, abi.FLOW_REPLIED, time.monotonic_ns()))
    collector = started()
    eventually(lambda: collector.collected().entries == 1)
    set_endpoint_flags(maps, abi.ENDPOINT_ON_NODE)
    eventually(lambda: collector.collected().retired == 1)
    assert [contents(maps[name]) for name in ("flows", "replies")] == [{}, {}]


def test_the_end_of_the_last_netfilter_flow_is_reported(maps: Maps, started: Start) -> None:
    """Conntrack has no flow with these addresses."""
    a, b = parse_address("192.0.2.1"), parse_address("192.0.2.2")
    key = abi.FLOW_KEY.pack(a, b, htons(80), htons(4000), IPPROTO_UDP, abi.AT_INGRESS, 0)
    maps["netfilter_flows"].update(key, bytes(4))
    noted: list[bool] = []
    started(note=noted.append)
    eventually(lambda: noted == [True, False])
    assert contents(maps["netfilter_flows"]) == {}


def test_bypassing_pods_are_reported_once_and_again_when_one_is_added(maps: Maps, started: Start) -> None:
    reports: list[frozenset[int]] = []
    maps["bypassing"].update(_U32.pack(17), bytes(8))
    collector = started(reports.append)
    eventually(lambda: reports)
    maps["bypassing"].update(_U32.pack(23), bytes(8))
    eventually(lambda: len(reports) > 1)
    collector.close()
    assert reports == [{17}, {17, 23}]


def test_an_exception_of_the_listener_does_not_end_the_thread(
    maps: Maps, started: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener is called again with the same pods, because it failed."""
    called = threading.Semaphore(0)

    def reject(seen: frozenset[int]) -> None:
        called.release()
        raise ValueError("unexpected")

    maps["bypassing"].update(_U32.pack(17), bytes(8))
    with caplog.at_level(logging.ERROR):
        started(reject)
        assert called.acquire(timeout=20)
        assert called.acquire(timeout=20)
    assert PODS_UNREAD in caplog.messages


def test_an_exception_of_a_walk_does_not_end_the_thread(
    maps: Maps, started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = sweep.FlowSweep.run
    failures = [OSError(24, "too many files"), ValueError("unexpected")]

    def failing(sweep: sweep.FlowSweep, rest: Callable[[float], bool], *, crowded: bool) -> sweep.Swept:
        if failures:
            raise failures.pop()
        return run(sweep, rest, crowded=crowded)

    monkeypatch.setattr(sweep.FlowSweep, "run", failing)
    write(maps, a_flow(flags=abi.FLOW_RESET))
    with caplog.at_level(logging.ERROR):
        collector = started()
        eventually(lambda: collector.collected().expired == 1)
    assert caplog.messages.count(COLLECT_FAILED) == 2


def test_close_does_not_wait_for_the_walk(
    maps: Maps, started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector rests after every batch; in this test the complete walk would take hours."""
    monkeypatch.setattr(flow_collector, "_REST_FACTOR", 10**9)
    monkeypatch.setattr(flow_collector, "_LONGEST_REST", 60.0)
    monkeypatch.setattr(flow_collector, "_PATIENCE", 50.0)
    now = time.monotonic_ns()
    maps["flows"].update_all(list(entries(*(a_flow(n, last_seen=now) for n in range(30_000))).items()))
    resting = threading.Event()
    rest = FlowCollector._rest

    def record(collector: FlowCollector, worked: float) -> bool:
        resting.set()
        return rest(collector, worked)

    monkeypatch.setattr(FlowCollector, "_rest", record)
    collector = started()
    assert resting.wait(20)
    collector.close()
    assert "not waiting" not in caplog.text
