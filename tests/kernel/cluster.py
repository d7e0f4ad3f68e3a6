"""A node in a lab with an agent, and Services that are changed by changing files.

This module is independent of the backend. To find out whether a change is in force, it connects to beacons:
Services that come into force after the change.
"""

import contextlib
import functools
import itertools
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from pyroute2.netlink.nfnetlink.nfctsocket import NFCTSocket

from ebpfproxy.backends.userspace.entries import other_port
from ebpfproxy.lab import Agent, Lab, Pod, manifests
from ebpfproxy.lab.manifests import Object
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.child import python
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from tests.kernel import clients
from tests.support import preloaded
from tests.support.foreign_sockets import creating_in

TCP_TARGET, UDP_TARGET = 8080, 5353
ZONE = "zone-a"
PATIENCE = 60.0
_PAUSE, _PAUSE_MAX = 0.01, 0.25  # seconds between two evaluations of a condition
START_PATIENCE = 600.0  # in a slow VM, several agents may compile and verify programs at the same time
_LAST = "last"
"""Name of the file that is written after each other file."""
SERVICE_NETWORKS = ("10.96.0.0/12", "fd00:10:96::/48")
SERVICE_CIDRS = ("10.96.0.0/15", "fd00:10:96::/112")
"""The networks of ClusterIPs. External and load balancer IPs are in the rest of SERVICE_NETWORKS."""


class PodEndpoint(NamedTuple):
    """A pod as an endpoint. `node`: "" for the pod's own node; `hints`: names of zones."""

    pod: Pod
    node: str = ""
    zone: str = ""
    hints: tuple[str, ...] = ()
    conditions: Mapping[str, bool] = MappingProxyType({})


def elsewhere(pod: Pod, **conditions: bool) -> PodEndpoint:
    """A pod that the Service's EndpointSlice assigns to another node."""
    return PodEndpoint(pod, node="elsewhere", conditions=conditions)


def terminating(pod: Pod, serving: bool = True) -> PodEndpoint:
    return PodEndpoint(pod, conditions={"ready": False, "serving": serving, "terminating": True})


class Exposed:
    """A Service with one address in each family, ports TCP 80 and UDP 53, and the same nodePort for both.

    `spec` is merged into the Service's spec; `to` changes its endpoints.
    """

    def __init__(
        self, cluster: "Cluster", name: str, v4: str, v6: str, node_port: int, spec: dict[str, Any]
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.v4 = v4
        self.v6 = v6
        self.node_port = node_port
        self.spec = spec
        self.status: dict[str, Any] = {}
        self.annotations: dict[str, str] = {}
        self.backends: tuple[Pod | PodEndpoint, ...] = ()

    def address(self, family: str) -> str:
        return self.v4 if family == "v4" else self.v6

    def to(self, *backends: Pod | PodEndpoint, **spec: Any) -> Self:
        """Set these endpoints and wait until they are in force."""
        self.backends = backends
        self.spec |= spec
        self.cluster.write(self.name, *self.objects())
        return self

    def set(self, **spec: Any) -> Self:
        """Change the Service's spec and wait until the change is in force."""
        return self.to(*self.backends, **spec)

    def objects(self) -> list[Object]:
        ports = [
            manifests.port(80, name="tcp", node_port=self.node_port),
            manifests.port(53, name="udp", protocol="UDP", node_port=self.node_port),
        ]
        service = manifests.service(
            self.name, [self.v4, self.v6], ports, annotations=self.annotations, **self.spec
        )
        if self.status:
            service["status"] = self.status
        targets = [
            manifests.port(TCP_TARGET, name="tcp"),
            manifests.port(UDP_TARGET, name="udp", protocol="UDP"),
        ]
        slices = [
            manifests.endpoint_slice(
                f"{self.name}-{family}",
                self.name,
                [self._endpoint(backend, family) for backend in self.backends],
                targets,
                family={"v4": "IPv4", "v6": "IPv6"}[family],
            )
            for family in ("v4", "v6")
        ]
        return [service, *slices]

    def _endpoint(self, given: Pod | PodEndpoint, family: str) -> Object:
        backend = given if isinstance(given, PodEndpoint) else PodEndpoint(given)
        node = backend.node or self.cluster.node_of(backend.pod)
        address = backend.pod.v4 if family == "v4" else backend.pod.v6
        entry = manifests.endpoint(address, node=node, zone=backend.zone, **backend.conditions)
        if backend.hints:
            entry["hints"] = {"forZones": [{"name": zone} for zone in backend.hints]}
        return entry


EACH_SYNC = "-v=4"
"""The flag with which the agent logs each sync, so that tests can count them."""


class Cluster:
    """A lab with servers in the pods a, b and c, clients in the pods p and q, and an agent with one mode.

    The servers answer on TCP_TARGET and UDP_TARGET with the name of their pod. Tests start the agent.
    """

    def __init__(self, lab: Lab, mode: str = "ebpf") -> None:
        self.lab = lab
        self.mode = mode
        self.folder = lab.folder / "manifests"
        self.folder.mkdir()
        self.a, self.b, self.c, self.p, self.q = (lab.pod(name) for name in "abcpq")
        self.beacon = lab.pod("beacon")
        for pod in (self.a, self.b, self.c):
            self.serve(pod)
        self.beacon.serve(Protocol.TCP, TCP_TARGET)
        self.route()
        self._disable_icmp_rate_limit()
        self._reserve_other_ports()
        self._agent: Agent | None = None
        self._started_with: tuple[str, ...] = ()
        self._rests = False
        self._names = itertools.count(1)
        self._beacons: dict[str, int] = {}
        self._ports = itertools.count(1)
        self.write_node()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def node(self) -> Pod:
        return self.lab.node

    @property
    def agent(self) -> Agent:
        assert self._agent, "the agent was not started"
        return self._agent

    def route(self) -> None:
        """Untranslated packets are dropped, instead of being forwarded in a loop until their TTL expires."""
        self.lab.ip(self.lab.outside, *(f"route add blackhole {network}" for network in SERVICE_NETWORKS))

    def _disable_icmp_rate_limit(self) -> None:
        """Disable the kernel's rate limit for ICMP errors, so that every rejected packet gets one. By default
        it sends six to one address and then one each second (icmpv4_xrlim_allow, icmpv6_xrlim_allow)."""
        for node in self.lab.nodes:
            for name in ("net/ipv4/icmp_ratelimit", "net/ipv6/icmp/ratelimit"):
                node.host.call(functools.partial(sysctl.ensure, name, "0"))

    def _reserve_other_ports(self) -> None:
        """No client of a node gets a port at which a relay of mode userspace listens by chance (decision
        0068)."""
        ports = ",".join(str(other_port(each)) for each in (53, 80, TCP_TARGET, UDP_TARGET))
        for node in self.lab.nodes:
            node.host.call(functools.partial(sysctl.ensure, "net/ipv4/ip_local_reserved_ports", ports))

    def node_of(self, pod: Pod) -> str:
        """The name of the pod's node."""
        return self.lab.node_name

    def client(self, kind: str) -> Pod:
        """The client for a class of sources: "pod" for a pod of this node, "node" for the node itself."""
        return {"pod": self.p, "node": self.node}[kind]

    @staticmethod
    def serve(pod: Pod) -> None:
        pod.serve(Protocol.TCP, TCP_TARGET)
        pod.serve(Protocol.UDP, UDP_TARGET)

    # The agent

    def start(self, *flags: str) -> Agent:
        """Start the agent and wait for its first sync."""
        self._started_with, self._rests = flags, False
        agent = self.launch(*flags)
        agent.await_sync(timeout=START_PATIENCE)
        return agent

    def launch(self, *flags: str, before: Sequence[str] = ()) -> Agent:
        """Start the agent without waiting; `before`: see `Node.agent`."""
        self.end()
        mode = f"--proxy-mode={self.mode}"
        self._agent = self.lab.agent(self.folder, mode, *flags, wait=0, before=before)
        return self._agent

    def end(self) -> None:
        """Kill the agent if it runs, like a crash."""
        if self._agent:
            self._agent.kill()
            self._agent = None

    def rest(self) -> None:
        """End the agent until `wake`. It takes CPU time also if nothing changes."""
        if self._agent:
            self.end()
            self._rests = True

    def wake(self) -> None:
        """Start the agent again if it rests."""
        if self._rests:
            self.start(*self._started_with)

    def ebpfproxy(
        self, *arguments: str, before: Sequence[str] = (), check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run an ebpfproxy command on the node with the lab's roots; `before`: see `Node.agent`."""
        roots = [f"--bpffs-root={self.lab.bpffs}", f"--cgroup-root={self.lab.cgroup}"]
        name, *rest = arguments
        command = [name, *roots, *rest]
        if not before:
            return preloaded.run(self.node, command, check=check, timeout=START_PATIENCE)
        command = [*before, *python("-m", "ebpfproxy"), *command]
        return self.node.run(command, check=check, timeout=START_PATIENCE)

    def http_get(self, path: str) -> str:
        """The body that the agent's metrics server returns for a path."""
        url = f"http://127.0.0.1:10249/{path}"
        with netns.entered(self.node.netns), urllib.request.urlopen(url, timeout=60) as response:
            return str(response.read().decode())

    def shows(self, line: str) -> bool:
        """Whether the metrics contain a text."""
        return line in self.http_get("metrics")

    def metric(self, name: str) -> float:
        """The sum of a metric over all labels; 0 if it does not exist."""
        lines = self.http_get("metrics").splitlines()
        found = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return sum(float(value) for key, _, value in found if key.partition("{")[0] == name)

    # Services

    def write_node(self, **labels: str) -> None:
        """Write this node's Node object with its addresses and zone, and the ServiceCIDR."""
        known = {"topology.kubernetes.io/zone": ZONE} | labels
        addresses = [self.node.v4, self.node.v6]
        manifests.write(
            self.folder / "node.yaml",
            manifests.node(self.lab.node_name, addresses, labels=known),
            manifests.service_cidr("kubernetes", SERVICE_CIDRS),
        )

    def service(self, node_port: bool = False, **spec: Any) -> Exposed:
        """A Service with unused addresses. It is written to a file only when its endpoints are set."""
        number = next(self._names)
        v4, v6 = f"10.96.{number >> 8}.{number & 255}", f"fd00:10:96::{number:x}"
        return Exposed(self, f"svc-{number}", v4, v6, 30000 + number if node_port else 0, spec)

    def write(self, name: str, *objects: Object) -> None:
        """Write these objects to a file; wait until they are in force and its previous objects are not.

        When the beacon in the same file answers, the sync that applies the file may still run. When a second
        beacon answers that was written after that, this sync has ended.
        """
        self._write_with_beacon(name, *objects)
        if self._agent:
            self._write_with_beacon(_LAST)

    def _write_with_beacon(self, name: str, *objects: Object) -> None:
        number = self._beacons.setdefault(name, len(self._beacons) + 1)
        address, port = f"10.97.{number >> 8}.{number & 255}", next(self._ports)
        beacon = f"beacon-{number}"
        manifests.write(
            self.folder / f"{name}.yaml",
            *objects,
            manifests.endpoint_slice(beacon, beacon, [self.beacon.v4], [manifests.port(TCP_TARGET)]),
            manifests.service(beacon, [address], [manifests.port(port)]),
        )
        if self._agent:
            self.await_beacon(address, port)

    def await_beacon(self, address: str, port: int) -> None:
        try:
            clients.first_to_answer(address, port, PATIENCE, creating_in(self.node))
        except TimeoutError as failure:
            failure.add_note("\n".join(line.text for line in self.agent.lines[-50:]))
            raise

    def forget_connections(self) -> None:
        """Empty the nodes' connection tracking tables, so that earlier connections do not matter.

        A new one gets another source port if netfilter has translated an earlier one to the same tuple.
        """
        for node in self.lab.nodes:
            node.host.call(_flush_conntrack)

    @contextlib.contextmanager
    def temporary(self) -> Iterator[None]:
        """After the block, remove the files that were added in it, without waiting for the agent."""
        before = {*self.folder.iterdir(), self.folder / f"{_LAST}.yaml"}
        yield
        for path in set(self.folder.iterdir()) - before:
            path.unlink()

    def remove_files(self) -> None:
        """Remove all files except for the Node object, without waiting for the agent."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.write_node()


def eventually(condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    """Poll the condition until it is true. Raises AssertionError after `patience` seconds."""
    started = time.monotonic()
    deadline = started + patience
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"{what}: not within {patience} s"
        # A long evaluation gets a longer pause: polling takes CPU time from other tests, above all in a VM.
        time.sleep(min(max(_PAUSE, now - started), _PAUSE_MAX))
        started = time.monotonic()


@contextlib.contextmanager
def local_address(cluster: Cluster, address: str) -> Iterator[None]:
    """Within the block, the node has this additional address."""
    cluster.lab.ip(cluster.node, f"addr add {address} dev lo nodad")
    try:
        yield
    finally:
        cluster.lab.ip(cluster.node, f"addr del {address} dev lo")


def _flush_conntrack() -> None:
    """Empty the table of the calling process's network namespace."""
    with NFCTSocket() as netlink:
        netlink.flush()
