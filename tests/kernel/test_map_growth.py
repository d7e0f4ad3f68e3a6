"""Maps that grow while clients connect. No connection fails, and none ends."""

import contextlib
import itertools
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.ebpf import backend as backend_module
from ebpfproxy.backends.ebpf import growth, programs
from ebpfproxy.backends.ebpf.backend import GROWN, GROWTH_FAILED, EbpfBackend, EbpfSettings
from ebpfproxy.backends.ebpf.entries import DeviceEntry, Entry, Key, ServicePortKey
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.bench.load import Load
from ebpfproxy.errors import NotYet, Rejected, TableFull
from ebpfproxy.lab import manifests
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.bpf.loader import load_and_pin
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.plan.service_plan import NodePlan
from tests.kernel.clients import TCP, UDP, connected, converse
from tests.kernel.cluster import Cluster, Exposed, eventually
from tests.kernel.service_table.samples import endpoint, entry, frontend
from tests.support.bpf_place import bpf_place
from tests.support.clock import Clock

pytestmark = pytest.mark.kernel

PORTS = 4200  # of a Service with two families, twice: more frontends than the map `services` has at first
ENDPOINTS = 1000  # of a slice


@contextlib.contextmanager
def steady_load(cluster: Cluster, load: Load, web: Exposed) -> Iterator[None]:
    """Within the block, a pod and a client outside keep connecting to a Service; no connection may fail."""
    node_port = [(cluster.node.v4, web.node_port), (cluster.node.v6, web.node_port)]
    inside = load.targets("inside", [(web.v4, 80), (web.v6, 80), *node_port])
    outside = load.targets("outside", node_port)
    running = [load.start_churn(cluster.p, inside), load.start_churn(cluster.lab.outside, outside)]
    try:
        yield
    except BaseException:
        for each in running:
            each.kill()
        raise
    for each in running:
        report = load.end_churn(each)
        assert (report["failed"], report["errors"]) == (0, {})
        assert report["attempts"] > 20


def capacity(cluster: Cluster, name: str) -> int:
    found = re.search(rf'^ebpfproxy_map_capacity{{map="{name}"}} (\S+)$', cluster.http_get("metrics"), re.M)
    assert found
    return int(float(found[1]))


def with_many_ports(cluster: Cluster, number: int) -> None:
    """Write a Service with PORTS ports in each family."""
    service = manifests.service(
        f"wide-{number}",
        [f"10.96.200.{number}", f"fd00:10:96::200:{number}"],
        [manifests.port(port, name=f"p{port}") for port in range(1, PORTS + 1)],
    )
    cluster.write(f"wide-{number}", service)


def with_many_endpoints(cluster: Cluster) -> None:
    """Write a Service of 17 ports with 10,000 endpoints each, in slices."""
    ports = range(1, 18)
    service = manifests.service("long", ["10.96.201.1"], [manifests.port(n, name=f"p{n}") for n in ports])
    slices = (
        manifests.endpoint_slice(
            f"long-{number}",
            "long",
            [f"10.{200 + number}.{i >> 8}.{i & 255}" for i in range(ENDPOINTS)],
            [manifests.port(8000 + n, name=f"p{n}") for n in ports],
        )
        for number in range(10)
    )
    cluster.write("long", service, *slices)


def logged(cluster: Cluster) -> list[str]:
    """The maps that the agent's log reports as enlarged."""
    return [line.values["map"] for line in cluster.agent.lines if GROWN in line.text]


@pytest.mark.long
def test_no_connection_fails_while_the_maps_of_services_grow(restartable: Cluster, load: Load) -> None:
    restartable.start()
    web = restartable.service(node_port=True).to(restartable.a, restartable.b)
    clients = [connected(restartable.p, protocol, web.v4, port) for protocol, port in ((TCP, 80), (UDP, 53))]
    clients.append(connected(restartable.lab.outside, TCP, restartable.node.v4, web.node_port))
    with contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
        names = [converse(client) for client in clients]
        sizes = {name: capacity(restartable, name) for name in ("services", "slots", "endpoints")}
        with steady_load(restartable, load, web):
            with_many_ports(restartable, 1)
            with_many_ports(restartable, 2)
            with_many_endpoints(restartable)
            eventually(
                lambda: all(capacity(restartable, name) > size for name, size in sizes.items()),
                "the maps have grown",
            )
            eventually(lambda: not restartable.metric("ebpfproxy_rejected_entries"), "everything fits")
        grown = {name: capacity(restartable, name) for name in sizes}
        assert {*sizes} <= {*logged(restartable)} <= {*sizes, "flows"}
        assert restartable.metric("ebpfproxy_map_growths_total") == len(logged(restartable))
        assert restartable.metric("ebpfproxy_rejected_entries") == 0
        assert [converse(client) for client in clients] == names
        eventually(
            lambda: len(list(restartable.lab.bpffs.glob("programs-*"))) == 1, "the previous maps are removed"
        )
        restartable.start()  # the sizes stay
        assert {name: capacity(restartable, name) for name in sizes} == grown
        assert [converse(client) for client in clients] == names


def test_no_connection_fails_while_the_maps_of_flows_grow(restartable: Cluster, load: Load) -> None:
    restartable.start("--ebpf-flows-max=2048")
    web = restartable.service(node_port=True).to(restartable.a, restartable.b)
    restartable.agent.stop()
    start = {**growth.START, "flows": 2048}
    sizes = MapSizes(flows=32768, half_open=MapSizes().half_open)
    settings = EbpfSettings(restartable.lab.cgroup, restartable.lab.bpffs, sizes=sizes, start=start)
    grown: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(netns.entered(restartable.node.netns))
        backend = EbpfBackend(settings, Callbacks(map_grown=grown.append))
        backend.open()
        stack.callback(backend.close)
        bring(backend)
        (pin,) = restartable.lab.bpffs.glob("maps/established_flows-*")
        with contextlib.closing(Map.pinned(pin)) as established:
            established.update(bytes(4), bytes(4))  # previous tests left flows
        backend.maintain()
        assert (grown, backend.report().usage["flows"][1]) == ([], 2048)
        address = restartable.node.v4, web.node_port
        held = [stack.enter_context(connected(restartable.lab.outside, TCP, *address)) for _ in range(20)]
        names = [converse(each) for each in held]
        with steady_load(restartable, load, web):

            def has_grown_twice() -> bool:
                backend.maintain()
                return len(grown) == 2

            eventually(has_grown_twice, "the maps have grown twice")
        assert (grown, backend.report().usage["flows"][1]) == (["flows", "flows"], 32768)
        assert [converse(each) for each in held] == names
        present = backend.read()
        assert not diff(present, present | backend.render((), NodePlan()))  # everything is attached


def bring(backend: EbpfBackend) -> None:
    """Replace what the agent attached, which used maps of other sizes."""
    present = backend.read()
    wanted = {
        key: entry._replace(sides=("ingress", "egress")) if isinstance(entry, DeviceEntry) else entry
        for key, entry in (present | backend.render((), NodePlan())).items()
    }
    assert not backend.apply(diff(present, wanted))


def single(number: int, target: int = 0) -> dict[Key, Entry]:
    key = ServicePortKey(f"default/s{number}", Protocol.TCP, Family.IPV4)
    return {key: entry([frontend(f"10.96.1.{number}")], [endpoint(f"10.2.0.{target or number}")])}


def test_a_failed_growth_changes_nothing_and_is_retried_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: object) -> None:
        raise Rejected("cannot load program connect4: Cannot allocate memory")

    clock = Clock()
    with bpf_place() as place:
        start = {"services": 5, "slots": 16, "endpoints": 16, "flows": 16}
        settings = EbpfSettings(place.cgroup, place.bpffs, start=start, devices=False)
        backend = EbpfBackend(settings, clock=clock)
        backend.open()
        with contextlib.closing(backend):
            first: dict[Key, Entry] = {**backend.render((), NodePlan())}
            for number in range(1, 5):
                first |= single(number)
            assert not backend.apply(diff(backend.read(), first))
            folders = set(place.bpffs.glob("*/*"))
            with monkeypatch.context() as patch:
                patch.setattr(programs, "load_and_pin", no_memory)
                for _ in range(2):
                    rejected = backend.apply(diff(first, {**first, **single(5)}))
                    assert [type(failure) for failure in rejected.values()] == [TableFull]
            assert caplog.messages.count(GROWTH_FAILED) == 1
            assert backend.read() == first
            assert backend.apply(diff(first, {**first, **single(5)}))
            clock.now += 61
            assert not backend.apply(diff(first, {**first, **single(5)}))
            assert backend.read() == {**first, **single(5)}
            assert backend.report().usage["services"] == (5, 8)
            assert folders.isdisjoint(set(place.bpffs.glob("programs-*/connect4")))


def test_changes_that_fit_do_not_wait_for_larger_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, may_load, can_grow = threading.Event(), threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> None:
        loads.set()
        assert may_load.wait(60)
        load_and_pin(*arguments)

    with bpf_place() as place:
        start = {"services": 5, "slots": 16, "endpoints": 16, "flows": 16}
        settings = EbpfSettings(place.cgroup, place.bpffs, start=start, devices=False)
        backend = EbpfBackend(settings, Callbacks(retry=can_grow.set))
        backend.open()
        with contextlib.closing(backend):
            present: dict[Key, Entry] = {**backend.render((), NodePlan())}
            for number in range(1, 5):
                present |= single(number)
            assert not backend.apply(diff(backend.read(), present))
            monkeypatch.setattr(programs, "load_and_pin", slowly)
            wanted = {**present, **single(5), **single(6), **single(7)}
            rejected = backend.apply(diff(present, wanted))
            assert loads.wait(60)
            assert rejected
            assert all(failure.postponed for failure in rejected.values())
            applied = {key: entry for key, entry in wanted.items() if key not in rejected}
            changed, third = single(2, target=9), single(3)
            assert not backend.apply(Delta(changed, frozenset(third)))  # while the programs are loaded
            applied = {key: each for key, each in {**applied, **changed}.items() if key not in third}
            assert backend.read() == applied
            # Regression: the slots that these changes release rested, and the Service had no endpoint left.
            for target in range(10, 40):
                changed = single(2, target)
                assert not backend.apply(Delta(changed, frozenset()))
            applied |= changed
            assert backend.read() == applied
            may_load.set()
            assert can_grow.wait(60)
            wanted = {**{key: each for key, each in wanted.items() if key not in third}, **changed}
            assert not backend.apply(diff(applied, wanted))
            assert backend.read() == wanted
            assert backend.report().usage["services"][1] > 5
            assert len(set(place.bpffs.glob("programs-*/connect4"))) == 1


def test_the_change_that_takes_larger_maps_into_use_is_no_longer_than_others() -> None:
    """Regression: it applied everything that waited, for 3 s beside a tenant with large tables."""
    can_grow, step = threading.Event(), [0.0]
    now = itertools.count(1)

    with bpf_place() as place:
        start = {"services": 5, "slots": 16, "endpoints": 16, "flows": 16}
        settings = EbpfSettings(place.cgroup, place.bpffs, start=start, devices=False)
        backend = EbpfBackend(settings, Callbacks(retry=can_grow.set), lambda: next(now) * step[0])
        backend.open()
        with contextlib.closing(backend):
            present: dict[Key, Entry] = {**backend.render((), NodePlan())}
            assert not backend.apply(diff(backend.read(), present))
            wanted = dict(present)
            for number in range(1, 9):
                wanted |= single(number)
            assert backend.apply(diff(present, wanted))
            assert can_grow.wait(60)
            step[0] = 1.0  # each look at the clock is a second later
            late = backend.apply(diff(backend.read(), wanted))
            assert len(late) > 1
            assert all(isinstance(failure, NotYet) for failure in late.values())
            assert backend.report().usage["services"][1] > 5
            step[0] = 0.0
            assert not backend.apply(diff(backend.read(), wanted))
            assert backend.read() == wanted


def test_after_an_error_in_the_middle_of_a_growth_everything_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the folder stayed locked, so that the agent could not open it again."""

    def fail(*_: object) -> None:
        raise Rejected("cannot access map services: Cannot allocate memory")

    with bpf_place() as place:
        start = {"services": 5, "slots": 16, "endpoints": 16, "flows": 16}
        backend = EbpfBackend(EbpfSettings(place.cgroup, place.bpffs, start=start, devices=False))
        backend.open()
        with contextlib.closing(backend):
            first: dict[Key, Entry] = {**backend.render((), NodePlan())}
            for number in range(1, 5):
                first |= single(number)
            assert not backend.apply(diff(backend.read(), first))
            wanted = {**first, **single(5)}
            with monkeypatch.context() as patch:
                patch.setattr(backend_module, "Maps", fail)
                with pytest.raises(Rejected):
                    backend.apply(diff(first, wanted))
            assert not backend.apply(diff(backend.read(), wanted))
            assert backend.read() == wanted
