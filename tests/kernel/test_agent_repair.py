"""Foreign changes to the agent's maps, links and cgroup are found at the next verification and repaired."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from socket import htons

import pytest

from ebpfproxy.agent.reconciler import NOT_SERVED, REPAIRED
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.lab import Netns, manifests
from ebpfproxy.lab.agent import is_sync
from ebpfproxy.linux.bpf.bpf import Link, Map, Program
from ebpfproxy.model.address import parse_address
from tests.kernel.clients import TCP, UDP, answers, outcome
from tests.kernel.cluster import Cluster, Exposed, eventually
from tests.kernel.scenarios import Scenarios, Stage, Steps
from tests.support.service_maps import U32, read_slot, write_slot

pytestmark = pytest.mark.kernel

OFTEN = "--sync-period=1s"


@contextlib.contextmanager
def pinned_map(restartable: Cluster, name: str) -> Iterator[Map]:
    layout = (restartable.lab.bpffs / "current").resolve()
    with contextlib.closing(Map.pinned(layout / "maps" / name)) as opened:
        yield opened


def service_key(web: Exposed) -> bytes:
    return abi.SERVICE_KEY.pack(parse_address(web.v4), htons(80), TCP, 0)


def endpoints_of(at: Stage, web: Exposed) -> set[str]:
    return set(answers(at.cluster.p, TCP, web.v4, 80, 12))


def await_served(at: Stage, web: Exposed) -> None:
    eventually(lambda: outcome(at.cluster.p, TCP, web.v4, 80, 0.1) == "a", "served")


scenario: Scenarios[Stage] = Scenarios()


def test_each_foreign_change_is_repaired(restartable: Cluster) -> None:
    agent = restartable.start(OFTEN)
    scenario.run(restartable, lambda: Stage(restartable))
    eventually(lambda: REPAIRED in agent.log(), "repairs are logged")
    assert restartable.metric("ebpfproxy_repairs_total") > 0


@scenario
def a_duplicated_service_id(at: Stage) -> Steps:
    """Regression: calico #13279, where two Services with the same id stayed mixed up until a restart."""
    one, two = at.service(at.cluster.a), at.service(at.cluster.b)
    yield ()
    with pinned_map(at.cluster, "services") as services:
        stolen = services.lookup(service_key(one))
        assert stolen
        services.update(service_key(two), stolen)
    eventually(lambda: endpoints_of(at, two) == {"b"}, "the Service has its own endpoints again")
    assert endpoints_of(at, one) == {"a"}


@scenario
def a_foreign_service_entry_and_a_deleted_one(at: Stage) -> Steps:
    web = at.service(at.cluster.a)
    yield ()
    foreign = abi.SERVICE_KEY.pack(parse_address("10.96.220.1"), htons(80), TCP, 0)
    with pinned_map(at.cluster, "services") as services:
        value = services.lookup(service_key(web))
        assert value
        services.update(foreign, value)
        services.delete(service_key(web))
        await_served(at, web)
        eventually(lambda: services.lookup(foreign) is None, "the foreign entry is removed")


@scenario
def overwritten_slots_and_endpoints(at: Stage) -> Steps:
    web = at.service(at.cluster.a, at.cluster.b)
    yield ()
    with contextlib.ExitStack() as opened:
        services, slots, endpoints = (
            opened.enter_context(pinned_map(at.cluster, name)) for name in ("services", "slots", "endpoints")
        )

        def used() -> range:
            value = services.lookup(service_key(web))
            assert value
            first, count = abi.SLOT_RANGE.unpack(abi.SERVICE.unpack(value)[0])
            return range(first, first + count)

        first, second = used()
        write_slot(slots, first, read_slot(slots, second))
        eventually(lambda: endpoints_of(at, web) == {"a", "b"}, "both slots are restored")
        key = U32.pack(read_slot(slots, used()[0]))
        endpoint = bytearray(endpoints.lookup(key) or b"")
        endpoint[:16] = parse_address(at.cluster.c.v4)
        endpoints.update(key, bytes(endpoint))
        eventually(lambda: endpoints_of(at, web) == {"a", "b"}, "the endpoint c is replaced")


@scenario
def unpinned_links(at: Stage) -> Steps:
    """The kernel releases a link after a while: until then the previous one may still serve."""
    web = at.service(at.cluster.a)
    yield ()
    since = len(at.cluster.agent.lines)
    for pin in (at.cluster.lab.bpffs / "links").iterdir():
        pin.unlink()
    at.cluster.agent.await_line(lambda line: REPAIRED in line.text, since)
    await_served(at, web)
    eventually(lambda: outcome(at.cluster.p, UDP, web.v4, 53, 0.1) == "a", "served over UDP")


@scenario
def links_attached_to_another_cgroup(at: Stage) -> Steps:
    """Regression: cilium #48420. Links exist at the agent's pins, and are attached to the wrong cgroup."""
    web, lab = at.service(at.cluster.a), at.cluster.lab
    yield ()
    with open_folder(at.cluster.q.cgroup) as fd:
        for pin in sorted((lab.bpffs / "links").iterdir()):
            pin.unlink()
            with contextlib.closing(Program.pinned(lab.bpffs / "current" / pin.name)) as program:
                attach_type = next(hook.attach_type for hook in SOCKET_HOOKS if hook.name == pin.name)
                with contextlib.closing(Link.create(program, fd, attach_type)) as link:
                    link.pin(pin)
    # The node's sockets first: pods are also served by packets once the agent has found that they bypass
    # hooks.
    served = functools.partial(outcome, at.cluster.node, TCP, web.v4, 80, 0.1)
    eventually(lambda: served() == "a", "attached at the root again")
    assert outcome(at.cluster.p, TCP, web.v4, 80) == "a"


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_removed_and_recreated_cgroup_gets_its_links_again(restartable: Cluster) -> None:
    """systemd does this when it stops and starts a slice. The links of the old cgroup have no effect."""
    top = restartable.lab.cgroup / "slice"

    def create() -> Netns:
        (top / "pod").mkdir(parents=True)
        return Netns("in-slice", restartable.p.namespace, top / "pod")

    def remove(pod: Netns) -> None:
        pod.reap()
        pod.cgroup.rmdir()
        top.rmdir()

    pod = create()
    web = restartable.service()
    web.backends = (restartable.a,)
    manifests.write(restartable.folder / "web.yaml", *web.objects())
    restartable.start(OFTEN, f"--cgroup-root={top}")
    eventually(lambda: outcome(pod, TCP, web.v4, 80, 0.1) == "a", "served")
    remove(pod)
    restartable.agent.await_line(lambda line: NOT_SERVED in line.text, timeout=10)
    pod = create()
    eventually(lambda: outcome(pod, TCP, web.v4, 80, 0.1) == "a", "served in the new cgroup")
    remove(pod)


# Maps that are full


def singles(restartable: Cluster, count: int) -> list[manifests.Object]:
    """`count` Services of one frontend and one endpoint each."""
    objects: list[manifests.Object] = []
    for number in range(1, count + 1):
        name = f"single-{number}"
        objects.append(manifests.service(name, [f"10.96.230.{number}"], [manifests.port(80)]))
        objects.append(manifests.endpoint_slice(name, name, [restartable.a.v4], [manifests.port(8080)]))
    return objects


def served(restartable: Cluster, count: int) -> int:
    """How many of the Services of `singles` answer."""
    return sum(
        outcome(restartable.p, TCP, f"10.96.230.{number}", 80, 1.0) == "a" for number in range(1, count + 1)
    )


@pytest.mark.parametrize(
    ("flag", "map_", "fits"),
    [
        ("--ebpf-services-max=5", "services", 4),
        ("--ebpf-slots-max=5", "slots", 4),
        ("--ebpf-endpoints-max=6", "endpoints", 4),
    ],
)
@pytest.mark.same_for("flag", "map_", "fits")
def test_entries_beyond_a_maps_size_are_reported_and_the_rest_is_served(
    restartable: Cluster, flag: str, map_: str, fits: int
) -> None:
    """Regression: cilium #15864, where the message was E2BIG."""
    restartable.ebpfproxy("cleanup")  # migrated maps would contain Services of other tests
    option, _, size = flag.partition("=")
    manifests.write(restartable.folder / "singles.yaml", *singles(restartable, 6))
    agent = restartable.start(flag, OFTEN)
    values = agent.await_line(lambda line: NOT_SERVED in line.text).values
    assert f"map {map_} is full" in values["reason"]
    assert f"of {fits} entries in use" in values["reason"] or f"of {size} entries in use" in values["reason"]
    assert "1 more" in values["reason"]
    assert option in values["hint"]
    assert served(restartable, 6) == fits
    assert restartable.metric("ebpfproxy_rejected_entries") == 6 - fits
    manifests.write(restartable.folder / "singles.yaml", *singles(restartable, fits))
    eventually(lambda: restartable.metric("ebpfproxy_rejected_entries") == 0, "all remaining Services fit")
    assert served(restartable, fits) == fits


def served_one(restartable: Cluster, count: int) -> tuple[int, str]:
    """One of the Services of `singles` that answers: the index of its two objects, and its name."""
    for number in range(1, count + 1):
        if outcome(restartable.p, TCP, f"10.96.230.{number}", 80, 1.0) == "a":
            return 2 * (number - 1), f"single-{number}"
    raise AssertionError("none of them is served")


def test_a_rejected_entry_does_not_delay_other_changes(restartable: Cluster) -> None:
    restartable.ebpfproxy("cleanup")
    manifests.write(restartable.folder / "singles.yaml", *singles(restartable, 5))
    agent = restartable.start("--ebpf-services-max=5", "-v=4")
    agent.await_line(lambda line: NOT_SERVED in line.text)
    at, name = served_one(restartable, 5)
    objects = singles(restartable, 5)
    latencies = []
    for endpoint in (restartable.b, restartable.c, restartable.a, restartable.b, restartable.c):
        before = len(agent.lines)
        changed = manifests.endpoint_slice(name, name, [endpoint.v4], [manifests.port(8080)])
        manifests.write(restartable.folder / "singles.yaml", *objects[: at + 1], changed, *objects[at + 2 :])
        synced = agent.await_line(is_sync, since=before).values
        assert synced["rejected"] == "1"
        latencies.append(float(synced["latency_ms"]))
    assert min(latencies) < 1000, "no change waits for a retry pause"
    assert restartable.metric("ebpfproxy_rejected_entries") == 1


def test_a_rejected_entry_is_retried_once_there_is_room(
    restartable: Cluster,
) -> None:
    """Freed slots are not reused for 3 s, and no verification runs in this test."""
    restartable.ebpfproxy("cleanup")
    manifests.write(restartable.folder / "singles.yaml", *singles(restartable, 5))
    agent = restartable.start("--ebpf-slots-max=5", "--sync-period=1h")
    agent.await_line(lambda line: NOT_SERVED in line.text)
    at, _ = served_one(restartable, 5)
    objects = singles(restartable, 5)
    manifests.write(restartable.folder / "singles.yaml", *objects[:at], *objects[at + 2 :])
    eventually(lambda: restartable.metric("ebpfproxy_rejected_entries") == 0, "the retry finds room")
    assert served(restartable, 5) == 4
