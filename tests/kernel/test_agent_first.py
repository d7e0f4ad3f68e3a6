"""Foreign programs at the node's devices while an agent serves external clients, in each mode."""

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from ebpfproxy.backends.ebpf.devices.positions import FIRST_AGAIN, PROGRAMS_BEFORE
from ebpfproxy.linux.bpf import tcx
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.linux.netns import netns
from tests.kernel import attached
from tests.kernel.clients import TCP, UDP, answers, outcome
from tests.kernel.cluster import START_PATIENCE, Cluster, Exposed, eventually
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.kernel.others import HEAD, NEXT, PASS, TAIL, Way, filtered, linked, order, program
from tests.kernel.plugins import PLUGINS, Plugin
from tests.kernel.two_nodes import Everywhere, TwoNodes, name_and_client
from tests.support.confined import without_tcx

pytestmark = pytest.mark.kernel

OVERWRITES = {"mark": 0x0F0F, "tc_index": 0xFFFF, "cb": 0xFFFFFFFF}
"""Every packet field that one program may pass to the next."""
_AT_ONCE = "--iptables-min-sync-period=0s"


class Kind(NamedTuple):
    """A way to run the agent."""

    mode: str
    flags: tuple[str, ...] = ()
    has_tcx: bool = True
    """False: nothing uses tcx, as on a kernel without it."""


AGENTS: Mapping[str, Kind] = {
    "ebpf": Kind("ebpf"),
    "ebpf-clsact": Kind("ebpf", has_tcx=False),
    "nftables": Kind("nftables", (_AT_ONCE,)),
    "iptables": Kind("iptables", (_AT_ONCE, "--iptables-backend=legacy")),
    "iptables-nft": Kind("iptables", (_AT_ONCE, "--iptables-backend=nft")),
    "ipvs": Kind("ipvs", ("--iptables-backend=legacy",)),
}
of_ebpf = [name for name, kind in AGENTS.items() if kind.mode == "ebpf"]
without_programs = [name for name in AGENTS if name not in of_ebpf]
WAYS = pytest.mark.parametrize("way", [linked, filtered], ids=["tcx", "tc"])
SIDES = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)


class Serving(NamedTuple):
    """A node with a running agent, and a NodePort for external clients."""

    cluster: Cluster
    kind: Kind
    web: Exposed

    def start(self) -> None:
        """Start the agent again after a crash. It has not seen a foreign program yet."""
        start(self.cluster, self.kind)

    def answers(self) -> bool:
        return is_served(self.cluster, self.web)

    def await_first(self, ifindex: int, side: Side) -> None:
        """Mode ebpf: wait until the agent's program is the first one at the device."""
        if self.kind.mode == "ebpf":
            eventually(lambda: is_first(ifindex, side), "the agent's program is first")

    def assert_all_answered(self) -> None:
        """TCP and UDP, IPv4 and IPv6."""
        outside, node, port = self.cluster.lab.outside, self.cluster.node, self.web.node_port
        for protocol in (TCP, UDP):
            for address in (node.v4, node.v6):
                assert set(answers(outside, protocol, address, port, 10)) == {"a"}, (protocol, address)


def skip_if_lacking(kind: Kind, way: Way) -> None:
    """Skip the test if this agent or this kernel excludes the way of attaching."""
    if way is linked and not kind.has_tcx:
        pytest.skip("this agent does not use tcx")
    if way is linked and not tcx.is_supported():
        pytest.skip("this kernel has no tcx")


def is_served(cluster: Cluster, web: Exposed) -> bool:
    return outcome(cluster.lab.outside, TCP, cluster.node.v4, web.node_port, 0.3) == "a"


def start(cluster: Cluster, kind: Kind) -> None:
    """Start the agent and wait for its first sync."""
    cluster.mode = kind.mode
    before = () if kind.has_tcx else without_tcx()
    cluster.launch("--sync-period=1h", *kind.flags, before=before).await_sync(timeout=START_PATIENCE)


def stop(cluster: Cluster) -> None:
    """End the agent; remove its state in the kernel and its files."""
    cluster.end()
    cluster.remove_files()
    cluster.ebpfproxy("cleanup")
    cluster.mode = "ebpf"


@contextlib.contextmanager
def at_uplink(cluster: Cluster) -> Iterator[int]:
    """Within the block, the calling thread is in the node's network namespace; the index of eth0 there."""
    with netns.entered(cluster.node.netns):
        yield socket.if_nametoindex("eth0")


def is_first(ifindex: int, side: Side) -> bool:
    """Whether the agent's program is the first one there."""
    return order(ifindex, side)[:1] == [attached.program_id(ifindex, side)]


@pytest.fixture(scope="module")
def serving(_restartable: Cluster, request: pytest.FixtureRequest) -> Iterator[Serving]:
    kind = AGENTS[request.param]
    skip_without_ipvs(kind.mode)
    start(_restartable, kind)
    yield Serving(_restartable, kind, _restartable.service(node_port=True).to(_restartable.a))
    stop(_restartable)


@pytest.mark.parametrize("serving", of_ebpf, indirect=True, scope="module")
@WAYS
@SIDES
@pytest.mark.parametrize("where", [HEAD, TAIL], ids=["head", "tail"])
@pytest.mark.parametrize(("action", "writes"), [(PASS, {}), (NEXT, OVERWRITES)], ids=["pass", "next"])
def test_clients_are_served_with_any_foreign_program_at_the_uplink(
    serving: Serving, way: Way, side: Side, where: int, action: int, writes: dict[str, int]
) -> None:
    """Within seconds, even if the agent has to move its program back to the first position."""
    skip_if_lacking(serving.kind, way)
    assert_serves_with(serving, way, (side,), where, action, writes)


@pytest.mark.parametrize("serving", without_programs, indirect=True, scope="module")
def test_a_mode_without_programs_serves_with_foreign_programs_at_the_uplink(serving: Serving) -> None:
    """The program overwrites every field that packets carry from one program to the next."""
    way = linked if tcx.is_supported() else filtered
    assert_serves_with(serving, way, tuple(Side), HEAD, NEXT, OVERWRITES)


def assert_serves_with(
    serving: Serving, way: Way, sides: Sequence[Side], where: int, action: int, writes: dict[str, int]
) -> None:
    """Attach a foreign program on these sides of the uplink. External clients are served."""
    eventually(serving.answers, "served without the foreign program")
    with contextlib.ExitStack() as stack:
        uplink = stack.enter_context(at_uplink(serving.cluster))
        for side in sides:
            foreign = stack.enter_context(program(action, **writes))
            stack.enter_context(way(uplink, side, foreign, where))
        for side in sides:
            serving.await_first(uplink, side)
        eventually(serving.answers, "served")
        serving.assert_all_answered()


@pytest.mark.parametrize("serving", of_ebpf, indirect=True, scope="module")
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
@pytest.mark.parametrize("comes", ["before", "after"])
def test_clients_are_served_with_a_network_plugins_programs(
    serving: Serving, plugin: Plugin, comes: str
) -> None:
    """The plugin has programs on both sides of the uplink and of the pod's device; it starts before or after
    the agent."""
    assert_serves_with_plugin(serving, plugin, comes)


@pytest.mark.parametrize("serving", without_programs, indirect=True, scope="module")
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
def test_a_mode_without_programs_serves_with_a_network_plugins_programs(
    serving: Serving, plugin: Plugin
) -> None:
    assert_serves_with_plugin(serving, plugin, "after")


def assert_serves_with_plugin(serving: Serving, plugin: Plugin, comes: str) -> None:
    serving.cluster.end()
    if comes == "after":
        serving.start()
    with contextlib.ExitStack() as stack:
        uplink = stack.enter_context(at_uplink(serving.cluster))
        sides = [(device, side) for device in (uplink, pod_device(serving)) for side in Side]
        for device, side in sides:
            foreign = stack.enter_context(plugin.loaded())
            way = plugin.attached(device, side, foreign, serving.kind.has_tcx)
            stack.enter_context(way)
        if comes == "before":
            serving.start()
        for side in Side:
            serving.await_first(uplink, side)
        eventually(serving.answers, "served")
        serving.assert_all_answered()


def pod_device(serving: Serving) -> int:
    """The index of the endpoint's device. The calling thread must be in the node's network namespace."""
    return socket.if_nametoindex(serving.cluster.a.device)


def ready(cluster: Cluster) -> tuple[int, list[dict[str, Any]]]:
    """The status of /readyz, and the devices in its body."""

    def ask() -> tuple[int, bytes]:
        try:
            answer = urllib.request.urlopen("http://127.0.0.1:10256/readyz", timeout=60)
            return int(answer.status), answer.read()
        except urllib.error.HTTPError as rejection:
            return rejection.code, rejection.read()

    code, body = cluster.node.call(ask)
    return code, json.loads(body).get("devices", [])


def test_a_program_that_keeps_taking_the_first_position_makes_the_node_not_ready(
    restartable: Cluster,
) -> None:
    agent = restartable.start("--sync-period=1h")
    web = restartable.service(node_port=True).to(restartable.a)
    assert ready(restartable) == (200, [])
    way = linked if tcx.is_supported() else filtered
    since, stop = len(agent.lines), threading.Event()

    def fight() -> None:
        with at_uplink(restartable) as uplink, program(PASS) as foreign:

            def regained() -> bool:
                return stop.is_set() or is_first(uplink, Side.INGRESS)

            while not stop.is_set():
                with way(uplink, Side.INGRESS, foreign, HEAD):
                    # The agent waits longer before each attempt, up to 5 minutes.
                    eventually(regained, "the agent's program is first", START_PATIENCE)

    fighter = threading.Thread(target=fight)
    fighter.start()
    try:
        agent.await_line(lambda line: PROGRAMS_BEFORE in line.text and "device=eth0" in line.text, since, 60)
        eventually(lambda: ready(restartable)[0] == 503, "not ready")
        (device, *_) = ready(restartable)[1] or [{"device": "eth0", "side": "ingress"}]
        assert (device["device"], device["side"]) == ("eth0", "ingress")
        eventually(lambda: restartable.metric("ebpfproxy_bypassed_device_sides") == 1, "the metric counts it")
        eventually(
            lambda: "first place at ingress of eth0" in doctor(restartable),
            "doctor names the device",
            START_PATIENCE,
        )
    finally:
        stop.set()
        fighter.join()
    agent.await_line(lambda line: FIRST_AGAIN in line.text, since, 60)
    eventually(lambda: ready(restartable) == (200, []), "ready again")
    assert is_served(restartable, web)


@pytest.fixture(scope="module")
def forwarding(
    _restartable_pair: TwoNodes, request: pytest.FixtureRequest
) -> Iterator[tuple[TwoNodes, Kind, Everywhere]]:
    """Two nodes; the first one masquerades a client's connections and forwards them to a pod on the
    second."""
    kind = AGENTS[request.param]
    start(_restartable_pair, kind)
    yield _restartable_pair, kind, _restartable_pair.everywhere().to(_restartable_pair.d)
    stop(_restartable_pair)


@pytest.mark.parametrize("forwarding", of_ebpf, indirect=True, scope="module")
@WAYS
@SIDES
@pytest.mark.parametrize("action", [PASS, NEXT], ids=["pass", "next"])
def test_masqueraded_connections_work_with_a_foreign_program_after_the_agents(
    forwarding: tuple[TwoNodes, Kind, Everywhere], way: Way, side: Side, action: int
) -> None:
    pair, kind, web = forwarding
    skip_if_lacking(kind, way)
    dial = pair.node.v4, web.node_port
    assert answers_of_d(pair, *dial, count=5)
    with contextlib.ExitStack() as stack:
        uplink = stack.enter_context(at_uplink(pair))
        foreign = stack.enter_context(program(action, **OVERWRITES))
        stack.enter_context(way(uplink, side, foreign, TAIL))
        assert answers_of_d(pair, *dial, count=5)


def answers_of_d(pair: TwoNodes, address: str, port: int, count: int) -> bool:
    return all(name_and_client(outcome(pair.x, TCP, address, port, 1.0))[0] == "d" for _ in range(count))


def doctor(cluster: Cluster) -> str:
    return str(cluster.ebpfproxy("doctor", check=False).stdout)
