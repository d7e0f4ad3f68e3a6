"""Two nodes in a lab with an agent on each, and an external client: for tests of packets between nodes.

Servers reply with their name and the client's address. A Service address that no node translates gets no
reply, because the router has no route to it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ebpfproxy.lab import Agent, Lab, Netns, Node, Pod, manifests, sockets
from ebpfproxy.model.address import Protocol
from tests.kernel import clients
from tests.kernel.clients import TCP, Dial
from tests.kernel.cluster import (
    EACH_SYNC,
    PATIENCE,
    SERVICE_NETWORKS,
    START_PATIENCE,
    TCP_TARGET,
    UDP_TARGET,
    ZONE,
    Cluster,
    Exposed,
)
from tests.kernel.differences import DIFFERENCES
from tests.support import datagrams
from tests.support.foreign_sockets import creating_in
from tests.support.offloads import set_offloads

FRONTENDS = ("ClusterIP", "NodePort", "ExternalIP", "LoadBalancer")
PORTS = {Protocol.TCP: 80, Protocol.UDP: 53}
RESETS_SOON = "--removed-endpoints-grace=1s", "--removed-endpoints-rate=1000"
"""For Services that request resets of connections to removed endpoints."""
NARROW = 1400
"""MTU of a narrow path; all others have 1500."""


class Everywhere(Exposed):
    """A Service with frontends of each kind in both families."""

    cluster: "TwoNodes"

    def objects(self) -> list[manifests.Object]:
        self.spec = {"type": "LoadBalancer", "externalIPs": list(self.external_ips)} | self.spec
        self.status = {"loadBalancer": {"ingress": [{"ip": vip} for vip in self.balancer_ips]}}
        return super().objects()

    @property
    def external_ips(self) -> tuple[str, str]:
        return self._addresses(98, 1)

    @property
    def balancer_ips(self) -> tuple[str, str]:
        return self._addresses(99, 2)

    def frontend(
        self, kind: str, family: str, protocol: Protocol, node: Pod | None = None
    ) -> tuple[str, int]:
        """Address and port of a frontend; for a NodePort, of the given node, by default the first one."""
        if kind == "NodePort":
            return getattr(node or self.cluster.node, family), self.node_port
        pairs = {
            "ClusterIP": (self.v4, self.v6),
            "ExternalIP": self.external_ips,
            "LoadBalancer": self.balancer_ips,
        }
        return pairs[kind][family == "v6"], PORTS[protocol]

    def dial(self, kind: str, family: str, protocol: Protocol, timeout: float = sockets.ANSWERED) -> Dial:
        return Dial(protocol, *self.frontend(kind, family, protocol), timeout)

    def _addresses(self, four: int, six: int) -> tuple[str, str]:
        number = int(self.name.removeprefix("svc-"))
        return f"10.{four}.{number >> 8}.{number & 255}", f"fd00:10:96:{six}::{number:x}"


class TwoNodes(Cluster):
    """As `Cluster`, with a second node that has the servers d and e and the client r.

    Both hosts are servers, too. `x` is the external client; its packets to Services go to the first node.
    """

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.flags: tuple[str, ...] = ()
        self.d, self.e, self.r = (self.second.pod(name) for name in "der")
        self.x = lab.outside
        for pod in (self.d, self.e):
            self.serve(pod)
        for node in lab.nodes:
            for address in (node.host.v4, node.host.v6):
                self.serve(node.host, address)
        self._second_agent: Agent | None = None
        self._second_ready = False

    @property
    def second(self) -> Node:
        return self.lab.nodes[1]

    @staticmethod
    def serve(pod: Pod, address: str = "::") -> None:
        pod.serve_echo(Protocol.TCP, TCP_TARGET, address)
        pod.serve_echo(Protocol.UDP, UDP_TARGET, address)

    def route(self) -> None:
        """The router sends packets from outside to the first node, and drops all others to Services."""
        gateways = (self.node.v4, self.node.v6)
        for network, gateway in zip(SERVICE_NETWORKS, gateways, strict=True):
            self.lab.ip(
                self.lab.router,
                f"route add blackhole {network}",
                f"route add {network} via {gateway} table 100",
            )
            family = "-6" if ":" in network else "-4"
            rule = ["rule", "add", "iif", "outside", "to", network, "lookup", "100"]
            self.lab.router.run(["ip", family, *rule])
        for pair in self.lab.addresses.further(16):
            # Deprecated from the start, so that they are not used as default source addresses.
            self.lab.ip(
                self.lab.outside,
                f"addr add {pair.v4}/32 dev lo",
                f"addr add {pair.v6}/128 dev lo nodad preferred_lft 0",
            )

    def node_of(self, pod: Pod) -> str:
        of_second = pod.name in self.second.pods or pod is self.second.host
        return self.second.name if of_second else self.lab.node_name

    def write_node(self, **labels: str) -> None:
        super().write_node(**labels)
        host = self.second.host
        manifests.write(
            self.folder / "node-2.yaml",
            manifests.node(
                self.second.name, [host.v4, host.v6], labels={"topology.kubernetes.io/zone": ZONE} | labels
            ),
        )

    def everywhere(self, **spec: Any) -> Everywhere:
        plain = self.service(node_port=True, **spec)
        return Everywhere(self, plain.name, plain.v4, plain.v6, plain.node_port, plain.spec)

    # The agents

    def launch(self, *flags: str, before: Sequence[str] = ()) -> Agent:
        """Start both agents without waiting (see `await_second`). `before`: for the first one."""
        agent = super().launch(*self._all_flags(flags), before=before)
        self._second_agent = self._start_second(*flags)
        return agent

    def restart(self, *flags: str) -> Agent:
        """Start the first node's agent again after a crash, and wait for its first sync."""
        if self._agent:
            self._agent.kill()
        self._agent = self.lab.agent(
            self.folder, f"--proxy-mode={self.mode}", *self._all_flags(flags), wait=START_PATIENCE
        )
        return self._agent

    def await_second(self) -> None:
        """Wait for the second agent's first sync. From then on, every change waits for it, too."""
        assert self._second_agent, "the agents were not started"
        if not self._second_ready:
            self._second_agent.await_sync(timeout=START_PATIENCE)
            self._second_ready = True
            self.write_node()
            self.service().to(self.a)  # then all changes during its start are in force, too

    def end(self) -> None:
        super().end()
        if self._second_agent:
            self._second_agent.kill()
            self._second_agent = None

    def await_beacon(self, address: str, port: int) -> None:
        super().await_beacon(address, port)
        if self._second_agent and self._second_ready:
            clients.first_to_answer(address, port, PATIENCE, creating_in(self.second.host))

    def _start_second(self, *flags: str) -> Agent:
        """Start the second node's agent. Only later starts are awaited: the first one takes long."""
        mode = f"--proxy-mode={self.mode}"
        wait = PATIENCE if self._second_ready else 0
        return self.second.agent(self.folder, mode, *self._all_flags(flags), wait=wait)

    def _all_flags(self, flags: tuple[str, ...]) -> tuple[str, ...]:
        return EACH_SYNC, "--sync-period=2s", *RESETS_SOON, *self.flags, *flags

    # Paths

    @property
    def all_netns(self) -> Sequence[Pod]:
        pods = (pod for node in self.lab.nodes for pod in node.pods.values())
        return (self.x, self.lab.router, *(node.host for node in self.lab.nodes), *pods)

    @contextlib.contextmanager
    def narrow_to_second_node(self) -> Iterator[None]:
        """Within the block, the router's path to the second node's pods has the MTU NARROW."""
        network, host = self.lab.addresses.pods(1), self.second.host
        with self._narrow(
            self.lab.router,
            f"{network.v4} via {host.v4}",
            f"{network.v6} via {host.v6}",
        ):
            yield

    @contextlib.contextmanager
    def narrow_to(self, pod: Pod) -> Iterator[None]:
        """Within the block, the first node's path to one of its pods has the MTU NARROW."""
        with self._narrow(
            self.node,
            f"{pod.v4}/32 dev {pod.device}",
            f"{pod.v6}/128 dev {pod.device}",
        ):
            yield

    @contextlib.contextmanager
    def narrow_to_outside(self) -> Iterator[None]:
        """Within the block, the router's path to the external client has the MTU NARROW."""
        with self._narrow(self.lab.router, f"{self.x.v4}/32 dev outside", f"{self.x.v6}/128 dev outside"):
            yield

    @contextlib.contextmanager
    def _narrow(self, netns: Pod, *routes: str) -> Iterator[None]:
        """A locked MTU also applies to forwarded packets (ip_dst_mtu_maybe_forward)."""
        self.lab.ip(netns, *(f"route replace {route} mtu lock {NARROW}" for route in routes))
        try:
            yield
        finally:
            self.lab.ip(netns, *(f"route replace {route}" for route in routes))
            for each in self.all_netns:
                for family in ("-4", "-6"):
                    each.run(["ip", family, "route", "flush", "cache"])

    @contextlib.contextmanager
    def without_offloads(self, *devices: tuple[Netns, str]) -> Iterator[None]:
        """Within the block, these devices leave checksums and segmentation to the stack."""
        for netns, device in devices:
            set_offloads(netns, device, False)
        try:
            yield
        finally:
            for netns, device in devices:
                set_offloads(netns, device, True)

    @property
    def by_socket(self) -> bool:
        """Whether pods' sockets connect to endpoints, so that their packets have no Service addresses."""
        return self.mode == "ebpf" and "--socket-lb=off" not in self.flags

    def seen_here(self, client: Pod, family: str) -> str:
        """The client address that the first node's pods see for external clients with policy Cluster."""
        masquerades = DIFFERENCES[self.mode].masquerades_here
        seen: str = getattr(self.lab.addresses.gateway(0) if masquerades else client, family)
        return seen

    def every_device(self) -> Iterator[tuple[Netns, str]]:
        """Both ends of every veth pair."""
        for pod in (pod for node in self.lab.nodes for pod in node.pods.values()):
            yield pod, "eth0"
        for node in self.lab.nodes:
            yield node.host, "eth0"
            yield from ((node.host, pod.device) for pod in node.pods.values())
            yield self.lab.router, node.cgroup.name
        yield self.x, "eth0"
        yield self.lab.router, "outside"

    def bad_checksums(self) -> dict[str, int]:
        """By netns, the number of packets with a wrong checksum since the lab was created."""
        counted = {netns.name: netns.call(_bad_checksums) for netns in self.all_netns}
        return {name: count for name, count in counted.items() if count}

    # Clients

    def serve_together(self, web: Everywhere, *others: Everywhere) -> None:
        """Put all of them in force with one change of the files."""
        webs = (web, *others)
        self.write(web.name, *(entry for each in webs for entry in each.objects()))

    def await_packets_of(self, pod: Pod, web: Exposed) -> None:
        """Wait until a Service answers a pod whose sockets bypass the node's hooks."""
        clients.first_to_answer(web.v4, 80, PATIENCE, creating_in(pod))


def _bad_checksums() -> int:
    """The sum of the calling process's InCsumErrors counters, all protocols and families."""
    total = 0
    with open("/proc/net/snmp") as lines:
        table = [line.split() for line in lines]
    for names, values in zip(table[::2], table[1::2], strict=True):
        total += sum(int(v) for n, v in zip(names, values, strict=True) if n == "InCsumErrors")
    with open("/proc/net/snmp6") as lines:
        total += sum(int(value) for name, value in map(str.split, lines) if name.endswith("InCsumErrors"))
    return total


def name_and_client(answer: str) -> tuple[str, str]:
    """A server's name and the client address that it saw; ("refused", "") and similar without a reply."""
    name, _, client = answer.partition(" ")
    return name, client


def streamed(netns: Netns, address: str, port: int, payload: bytes, timeout: float = 10.0) -> bytes:
    """The part of the payload that a server sends back over TCP."""
    with sockets.dial(TCP, address, port, timeout, create=creating_in(netns)) as client:
        return sockets.exchange(client, payload)


def echoed(netns: Netns, address: str, port: int, payload: bytes) -> bytes:
    """The data that a server sends back for one datagram."""
    with sockets.dial(Protocol.UDP, address, port, 0.3, create=creating_in(netns)) as client:
        return datagrams.exchange_datagram(client, payload)


def route_mtu(netns: Netns, address: str) -> int:
    """The path MTU that the netns has learned for the address; 0 if none."""
    words = netns.run(["ip", "route", "get", address]).stdout.split()
    return int(words[words.index("mtu") + 1]) if "mtu" in words else 0
