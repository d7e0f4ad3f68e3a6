"""Role edge: real agents on machines outside the cluster, with real packets of a client behind a router."""

import collections
import contextlib
import itertools
import json
import pathlib
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ebpfproxy.agent.daemon import ENDING, RESTARTING
from ebpfproxy.agent.edge import DRAINING
from ebpfproxy.agent.protected_claims import NOT_SERVED
from ebpfproxy.agent.vip_device import ANNOUNCED, WITHDRAWN
from ebpfproxy.http.node_checker import NODE_DOWN, NODE_UP
from ebpfproxy.lab import Agent, Call, Lab, Pod, PodNetwork, manifests
from ebpfproxy.lab.agent import PROGRAM
from ebpfproxy.model.address import Protocol
from tests.kernel import clients
from tests.kernel.clients import TCP, UDP
from tests.kernel.cluster import EACH_SYNC, START_PATIENCE, TCP_TARGET, UDP_TARGET, eventually

pytestmark = pytest.mark.kernel

DEVICE = "ebpfproxy-vip"
HEALTHZ = 10256
FOREVER = 3600


class Cloud:
    """An edge, and two nodes with the pods a, b (first node) and c (second node), which have no agents."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.client, self.edge = lab.outside, lab.edges[0]
        first, second = lab.nodes
        self.node_called = {"first": first, "second": second}
        self.pods = {name: node.pod(name) for name, node in (("a", first), ("b", first), ("c", second))}
        self.node_of = {"a": first, "b": first, "c": second}
        for pod in self.pods.values():
            pod.serve_echo(Protocol.TCP, TCP_TARGET)
            pod.serve_echo(Protocol.UDP, UDP_TARGET)
        self.health: dict[str, Call[None]] = {}
        for name in self.node_called:
            self.set_health(name, True)
        lab.ip(
            lab.router,
            f"route add {lab.addresses.vips.v4} via {self.edge.host.v4}",
            f"route add {lab.addresses.vips.v6} via {self.edge.host.v6}",
        )
        self.folder = lab.folder
        for node in lab.nodes:
            self.write(manifests.node(node.name, [node.host.v4, node.host.v6]))
        self.agent: Agent | None = None
        self._services = 0

    def set_health(self, node: str, healthy: bool) -> None:
        """Start or stop the health server of a node."""
        if healthy:
            self.health[node] = self.node_called[node].host.serve_http(HEALTHZ, "ok")
        else:
            self.health.pop(node).kill()

    def write(self, value: manifests.Object) -> None:
        name = f"{value['kind']}-{value['metadata']['name']}.yaml".lower()
        manifests.write(self.folder / name, value)

    def start(self, *flags: str) -> Agent:
        self.agent = self.edge.agent(
            self.folder, "--role=edge", "--edge-check-interval=50ms", EACH_SYNC, *flags
        )
        return self.agent

    def restart(self, *flags: str) -> Agent:
        if self.agent:
            self.agent.kill()
        return self.start(*flags)

    @property
    def running(self) -> Agent:
        assert self.agent
        return self.agent

    def service(self, *endpoints: str | manifests.Object, **spec: Any) -> "Exposed":
        self._services += 1
        made = Exposed(self, self._services, spec)
        made.to(*endpoints)
        return made

    def changes(self) -> tuple[int, int]:
        """How many changes of Services and EndpointSlices the edge has received, and how many of them are not
        in force yet. Waits for the first sync of the agent."""
        text = ""

        def has_synced() -> bool:
            nonlocal text
            text = self.edge.host.call(self._metrics)
            return "kubeproxy_sync_proxy_rules_last_timestamp_seconds{" in text

        eventually(has_synced, "the agent has synced", START_PATIENCE)
        changes = r"^kubeproxy_sync_proxy_rules_\w+_changes_(total|pending) (\S+)$"
        sums = collections.Counter[str]()
        for kind, value in re.findall(changes, text, re.MULTILINE):
            sums[kind] += int(float(value))
        return sums["total"], sums["pending"]

    @staticmethod
    def _metrics() -> str:
        try:
            with urllib.request.urlopen("http://127.0.0.1:10249/metrics", timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.URLError:
            return ""

    def announced(self) -> set[str]:
        """The addresses on the device, as ip(8) shows them. None as long as the device is down: the agent
        creates it first and sets it up afterwards."""
        shown = subprocess.run(
            ["ip", "-n", self.edge.host.namespace, "-j", "address", "show", "dev", DEVICE],
            capture_output=True,
            check=False,
            text=True,
        )
        if shown.returncode:
            return set()
        (link,) = (each for each in json.loads(shown.stdout) if each)
        if "UP" not in link["flags"]:
            return set()
        return {each["local"] for each in link["addr_info"] if each["scope"] == "global"}


class Exposed:
    """A Service of type LoadBalancer with a TCP and a UDP port, and a VIP of each family."""

    def __init__(self, cloud: Cloud, number: int, spec: dict[str, Any]) -> None:
        self.cloud = cloud
        self.name = f"svc-{number}"
        self.v4, self.v6 = cloud.lab.addresses.vip(number)
        self.cluster_ip = f"10.96.0.{number}"
        self.node_port = 30000 + number
        self.spec = spec
        self._objects: list[manifests.Object] = []

    def to(self, *endpoints: str | manifests.Object, **spec: Any) -> "Exposed":
        """Write the Service with these pods as endpoints, and wait until the edge has it."""
        self.spec |= spec
        ports = [
            manifests.port(80, name="tcp", target=TCP_TARGET, node_port=self.node_port),
            manifests.port(53, name="udp", protocol="UDP", target=UDP_TARGET),
        ]
        service = manifests.service(
            self.name,
            [self.cluster_ip, f"fd00:10:96::{self.cloud._services:x}"],
            ports,
            **{"type": "LoadBalancer"} | self.spec,
        )
        service["status"] = {"loadBalancer": {"ingress": [{"ip": each} for each in (self.v4, self.v6)]}}
        slices = [self._slice(family, endpoints) for family in ("v4", "v6")]
        self._apply([service, *slices])
        return self

    def delete(self) -> None:
        self._apply([])

    def _apply(self, objects: list[manifests.Object]) -> None:
        """Write the objects; wait until the edge has received as many changes and has them in force. A line
        about a sync does not say of which changes."""
        changed = sum(new != old for new, old in itertools.zip_longest(objects, self._objects))
        self._objects = objects
        path = self.cloud.folder / f"{self.name}.yaml"
        before = self.cloud.changes()[0] if self.cloud.agent else 0
        if objects:
            manifests.write(path, *objects)
        else:
            path.unlink()
        if self.cloud.agent:

            def is_in_force() -> bool:
                received, pending = self.cloud.changes()
                return received >= before + changed and not pending

            eventually(is_in_force, f"{self.name} is in force")

    def answers(self, count: int = 16) -> set[str]:
        """The pods that answer new TCP connections of the client."""
        replies = clients.answers(self.cloud.client, TCP, self.v4, 80, count)
        return {each.split()[0] for each in replies}

    def _slice(self, family: str, endpoints: Sequence[str | manifests.Object]) -> manifests.Object:
        entries = [self._endpoint(each, family) for each in endpoints]
        return manifests.endpoint_slice(
            f"{self.name}-{family}",
            self.name,
            entries,
            [
                manifests.port(TCP_TARGET, name="tcp"),
                manifests.port(UDP_TARGET, name="udp", protocol="UDP"),
            ],
            family="IPv6" if family == "v6" else "IPv4",
        )

    def _endpoint(self, endpoint: str | manifests.Object, family: str) -> manifests.Object:
        if not isinstance(endpoint, str):
            return endpoint
        name, _, state = endpoint.partition("!")
        return manifests.endpoint(
            getattr(self.cloud.pods[name], family),
            node=self.cloud.node_of[name].name,
            ready=state != "unready",
        )


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with Lab("test-edge", 81, PodNetwork.ROUTED, edges=1) as lab:
        made = Cloud(lab)
        made.start()
        yield made
        made.running.kill()


@pytest.fixture
def web(cloud: Cloud) -> Iterator[Exposed]:
    made = cloud.service("a", "b", "c")
    yield made
    made.delete()


@contextlib.contextmanager
def unhealthy(cloud: Cloud, *nodes: str) -> Iterator[None]:
    """Stop the health servers of nodes in the block."""
    since = len(cloud.running.lines)
    for node in nodes:
        cloud.set_health(node, False)
    await_health(cloud, NODE_DOWN, nodes, since)
    try:
        yield
    finally:
        since = len(cloud.running.lines)
        for node in nodes:
            cloud.set_health(node, True)
        await_health(cloud, NODE_UP, nodes, since)


def await_health(cloud: Cloud, message: str, nodes: Sequence[str], since: int) -> None:
    """Wait until the edge has logged the message for each of the nodes."""
    for node in nodes:
        text = f"node={cloud.node_called[node].name}"
        cloud.running.await_line(lambda line, text=text: message in line.text and text in line.text, since)  # type: ignore[misc]


def metric(cloud: Cloud, name: str) -> float:
    body = cloud.edge.host.call(
        lambda: urllib.request.urlopen("http://127.0.0.1:10249/metrics", timeout=5).read().decode()
    )
    (line,) = (each for each in body.splitlines() if each.startswith(f"{name} "))
    return float(line.rpartition(" ")[2])


def await_announced_metric(cloud: Cloud) -> None:
    """The agent sets the metric after it has changed the device."""
    eventually(
        lambda: metric(cloud, "ebpfproxy_edge_announced_addresses") == len(cloud.announced()),
        "the metric is the number of announced addresses",
    )


def healthz(cloud: Cloud) -> int:
    def ask() -> int:
        try:
            return int(urllib.request.urlopen("http://127.0.0.1:10256/healthz", timeout=5).status)
        except urllib.error.HTTPError as error:
            return error.code

    return cloud.edge.host.call(ask)


def seen(client: Pod, protocol: Protocol, address: str, port: int) -> tuple[str, str]:
    """The pod that answers, and the address that it sees."""
    name, source = clients.outcome(client, protocol, address, port).split()
    return name, source.removeprefix("::ffff:")


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_clients_reach_all_nodes_through_the_edge_with_its_address(
    cloud: Cloud, web: Exposed, family: str
) -> None:
    vip, edge = getattr(web, family), getattr(cloud.edge.host, family)
    found = [seen(cloud.client, TCP, vip, 80) for _ in range(24)]
    found += [seen(cloud.client, UDP, vip, 53) for _ in range(24)]
    assert {name for name, _ in found} == {"a", "b", "c"}
    assert {source for _, source in found} == {edge}
    assert vip in cloud.announced()


def test_policy_local_selects_from_all_endpoints(cloud: Cloud) -> None:
    port = 31500
    checks = [node.host.serve_http(port, "ok") for node in cloud.lab.nodes]
    web = cloud.service("a", "c", externalTrafficPolicy="Local", healthCheckNodePort=port)
    assert web.answers() == {"a", "c"}
    since = len(cloud.running.lines)
    checks[1].kill()
    cloud.running.await_line(lambda line: NODE_DOWN in line.text and f"port={port}" in line.text, since)
    eventually(lambda: web.answers() == {"a"}, "the node without health checks is avoided")
    web.delete()
    checks[0].kill()


def test_neither_cluster_ips_nor_node_ports_are_served(cloud: Cloud, web: Exposed) -> None:
    cloud.lab.ip(cloud.lab.router, f"route replace 10.96.0.0/16 via {cloud.edge.host.v4}")
    assert clients.outcome(cloud.client, TCP, web.cluster_ip, 80, 0.5) == clients.SILENT
    assert clients.outcome(cloud.client, TCP, cloud.edge.host.v4, web.node_port, 5) == clients.REFUSED
    assert seen(cloud.client, TCP, web.v4, 80)[0] in cloud.pods


def test_source_ranges_are_enforced(cloud: Cloud) -> None:
    web = cloud.service("a", loadBalancerSourceRanges=["192.0.2.0/24", "2001:db8::/32"])
    assert clients.outcome(cloud.client, TCP, web.v4, 80, 0.5) == clients.SILENT
    web.to("a", loadBalancerSourceRanges=[f"{cloud.client.v4}/32"])
    assert web.answers(4) == {"a"}
    web.delete()


def test_a_node_that_is_down_gets_no_new_connections_and_keeps_its_open_ones(
    cloud: Cloud, web: Exposed
) -> None:
    connections: dict[str, socket.socket] = {}
    while set(connections) != {"a", "b", "c"}:
        opened = clients.connected(cloud.client, TCP, web.v4, 80)
        connections[clients.converse(opened).split()[0]] = opened
    with unhealthy(cloud, "second"):
        eventually(lambda: web.answers() == {"a", "b"}, "the node that is down is avoided")
        assert metric(cloud, "ebpfproxy_edge_nodes_down") == 1
        assert clients.converse(connections["c"]).split()[0] == "c"
    eventually(lambda: web.answers(48) == {"a", "b", "c"}, "the node is used again")
    for each in connections.values():
        each.close()


def test_if_all_nodes_are_down_all_are_used(cloud: Cloud, web: Exposed) -> None:
    with unhealthy(cloud, "first", "second"):
        eventually(lambda: web.answers(48) == {"a", "b", "c"}, "all nodes are used")
        assert web.v4 in cloud.announced()


def test_an_address_without_a_usable_endpoint_is_withdrawn(cloud: Cloud) -> None:
    web = cloud.service("a")
    eventually(lambda: {web.v4, web.v6} <= cloud.announced(), "it is announced")
    await_announced_metric(cloud)
    web.to("a!unready")
    eventually(lambda: not {web.v4, web.v6} & cloud.announced(), "it is withdrawn")
    await_announced_metric(cloud)
    web.to("a")
    eventually(lambda: {web.v4, web.v6} <= cloud.announced(), "it is announced again")
    web.delete()
    eventually(lambda: not {web.v4, web.v6} & cloud.announced(), "it is withdrawn with its Service")


def test_an_address_or_device_that_another_program_removes_is_restored(cloud: Cloud, web: Exposed) -> None:
    host = cloud.edge.host
    eventually(lambda: web.v4 in cloud.announced(), "it is announced")
    cloud.lab.ip(host, f"addr del {web.v4}/32 dev {DEVICE}")
    eventually(lambda: web.v4 in cloud.announced(), "the address is restored")
    cloud.lab.ip(host, f"link del {DEVICE}")
    eventually(lambda: {web.v4, web.v6} <= cloud.announced(), "the device is restored")


def test_the_address_of_a_node_is_not_announced(cloud: Cloud) -> None:
    address, since = cloud.lab.nodes[1].host.v4, len(cloud.running.lines)
    web = cloud.service("a", externalIPs=[address])
    cloud.running.await_line(
        lambda line: NOT_SERVED in line.text and line.values["address"] == address, since
    )
    eventually(lambda: web.v4 in cloud.announced(), "the other address is announced")
    assert address not in cloud.announced()
    web.delete()


def test_a_node_whose_address_changes_is_checked_at_its_new_address(cloud: Cloud, web: Exposed) -> None:
    node = cloud.lab.nodes[1]
    since = len(cloud.running.lines)
    cloud.write(manifests.node(node.name, ["127.1.1.1"]))
    cloud.running.await_line(lambda line: NODE_DOWN in line.text and node.name in line.text, since)
    since = len(cloud.running.lines)
    cloud.write(manifests.node(node.name, [node.host.v4, node.host.v6]))
    cloud.running.await_line(lambda line: NODE_UP in line.text and node.name in line.text, since)


def test_after_a_crash_addresses_and_connections_stay(cloud: Cloud, web: Exposed) -> None:
    with clients.connected(cloud.client, TCP, web.v4, 80) as opened:
        name = clients.converse(opened)
        cloud.running.kill()
        assert clients.converse(opened) == name
        assert web.v4 in cloud.announced()
        assert web.answers(48) == {"a", "b", "c"}
        agent = cloud.start()
        assert clients.converse(opened) == name
    assert WITHDRAWN not in agent.log()
    assert ANNOUNCED not in agent.log()


def test_a_drain_withdraws_the_addresses_and_continues_to_forward(cloud: Cloud, web: Exposed) -> None:
    agent = cloud.restart(f"--edge-drain-seconds={FOREVER}")
    eventually(lambda: web.v4 in cloud.announced(), "it is announced")
    assert healthz(cloud) == 200
    with clients.connected(cloud.client, TCP, web.v4, 80) as opened:
        name = clients.converse(opened)
        agent.process.send_signal(signal.SIGTERM)
        agent.await_line(lambda line: DRAINING in line.text)
        assert cloud.announced() == set()
        assert healthz(cloud) == 503
        assert clients.converse(opened) == name
        assert web.answers(48) == {"a", "b", "c"}  # packets that are still routed here
        web.to("a")
        eventually(lambda: web.answers(8) == {"a"}, "changes are applied during the drain")
        assert cloud.announced() == set()
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(20) == 0
        agent.await_line(lambda line: ENDING in line.text)
        assert clients.converse(opened) == name
    assert cloud.announced() == set()
    cloud.start()
    eventually(lambda: web.v4 in cloud.announced(), "it is announced after the next start")


@pytest.mark.same_for("number")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_ends_by_itself(cloud: Cloud, web: Exposed, number: signal.Signals) -> None:
    agent = cloud.restart("--edge-drain-seconds=1")
    eventually(lambda: web.v4 in cloud.announced(), "it is announced")
    began = time.monotonic()
    agent.process.send_signal(number)
    assert agent.process.wait(30) == 0
    assert time.monotonic() - began >= 1  # the least time; the longest one depends on the machine
    agent.await_line(lambda line: ENDING in line.text and f"signal={number.name}" in line.text)
    cloud.start()


def test_a_changed_configuration_does_not_end_the_drain(
    cloud: Cloud, web: Exposed, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "config.yaml"
    head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    file.write_text(head)
    agent = cloud.restart("--edge-drain-seconds=1", f"--config={file}")
    eventually(lambda: web.v4 in cloud.announced(), "it is announced")
    began = time.monotonic()
    agent.process.send_signal(signal.SIGTERM)
    agent.await_line(lambda line: DRAINING in line.text)
    file.write_text(head + "iptables: {syncPeriod: 20s}\n")
    agent.process.send_signal(signal.SIGHUP)
    assert agent.process.wait(30) == 0
    assert time.monotonic() - began >= 1
    agent.await_line(lambda line: ENDING in line.text)
    assert RESTARTING not in agent.log()
    cloud.start()


def test_without_a_drain_the_addresses_stay(cloud: Cloud, web: Exposed) -> None:
    agent = cloud.restart("--edge-drain-seconds=0")
    eventually(lambda: web.v4 in cloud.announced(), "it is announced")
    assert agent.stop() == 0
    assert web.v4 in cloud.announced()
    cloud.start()


def test_only_addresses_of_the_given_networks_are_served(cloud: Cloud) -> None:
    web, other = cloud.service("a"), cloud.service("c")
    cloud.restart(f"--edge-vip-cidrs={web.v4}/32")
    eventually(lambda: cloud.announced() == {web.v4}, "only one address is announced")
    assert web.answers(4) == {"a"}
    assert clients.outcome(cloud.client, TCP, other.v4, 80, 0.5) == clients.SILENT
    cloud.restart()
    web.delete()
    other.delete()


def test_another_mode_is_one_error(cloud: Cloud) -> None:
    agent = cloud.edge.agent(cloud.folder, "--role=edge", "--proxy-mode=nftables", wait=0)
    assert agent.process.wait(30) == 2
    agent.await_line(lambda line: "--role: edge needs mode ebpf, not nftables" in line.text)


def test_cleanup_removes_the_device(cloud: Cloud, web: Exposed) -> None:
    eventually(lambda: web.v4 in cloud.announced(), "it is announced")
    cloud.running.kill()
    command = [*PROGRAM[:-1], "cleanup"]
    options = [f"--cgroup-root={cloud.edge.cgroup}", f"--bpffs-root={cloud.edge.bpffs}"]
    shown = cloud.edge.host.run([*command, "--dry-run", *options]).stdout
    assert f"would remove device {DEVICE}" in shown
    assert web.v4 in cloud.announced()
    assert f"removed device {DEVICE}" in cloud.edge.host.run([*command, *options]).stdout
    assert cloud.announced() == set()
    cloud.start()


@pytest.mark.parametrize("command", ["verify", "explain"])
def test_the_kernel_matches_the_cluster_for_the_tools(cloud: Cloud, web: Exposed, command: str) -> None:
    eventually(lambda: web.v4 in cloud.announced(), "it is announced")
    options = ["--role=edge", f"--manifests={cloud.folder}"]
    options += [f"--cgroup-root={cloud.edge.cgroup}", f"--bpffs-root={cloud.edge.bpffs}"]
    if command == "explain":
        options += [f"{web.v4}:80", f"--from={cloud.client.v4}"]
    done = cloud.edge.host.run([*PROGRAM[:-1], command, *options], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
