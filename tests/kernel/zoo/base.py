"""The node that every situation changes, with its clients, servers and Services.

    outside ── router ── eth0 ── node ── pods p (client) and a (server)
                  │                └──── docker0 ── guest
                  └── second node ── pod d (server)

Only the first node has an agent. The guest is a container of Docker.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ebpfproxy.lab import Agent, Lab, Netns, Pod, PodNetwork, manifests
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.lab.sockets import ANSWERED
from ebpfproxy.linux import sysctl
from ebpfproxy.model.address import Protocol
from tests.kernel import clients
from tests.kernel.clients import SILENT, Dial
from tests.kernel.cluster import SERVICE_NETWORKS, START_PATIENCE, TCP_TARGET, UDP_TARGET
from tests.kernel.zoo.flows import CLIENT, DEFAULTS, ENDPOINTS, FAMILIES, HOST, NODE, SERVICES, Flow
from tests.kernel.zoo.virtual_machine import connect_taps
from tests.support.foreign_sockets import creating_in

PORTS = {name: 101 + number for number, name in enumerate(SERVICES)}
HOST_PORTS = dict.fromkeys(("self", "second"), 9090)
"""Ports of the servers on the two nodes themselves."""
NODE_PORTS = {name: 30100 + number for number, name in enumerate(SERVICES)}
BALANCERS = Pair("10.99.0.0/24", "fd00:10:96:2::/64")
"""The networks of the usual load balancer addresses."""
SILENCE = 0.4
"""Seconds after which a client without a reply counts as SILENT, if no reply is expected."""
PATIENCE = 15.0
"""Seconds until the agent serves a changed node."""
RESET = "reset"
"""The result of a connection that was accepted and ended without an answer."""


class Zoo:
    """The base node. A situation changes its attributes and its network before the agent starts.

    - `clients`: the network namespace and cgroup of each client, by its name;
    - `families`: those of the cluster;
    - `changes`: functions that change the node after the agent's first sync;
    - `addresses`: the node's address to which clients send packets for NodePorts, by name of the client;
    - `balancer`: a function that returns the load balancer addresses of the n-th Service;
    - `towards`: the node's address towards endpoints on this and the other node, and towards the other node
      itself: "here", "there" and "second"; "there from pod" only for clients in the pod;
    - `also_towards`: another address that the node may have towards all of them;
    - `by_packet`: clients whose pod has devices or rules of its own, so that the packet path serves it;
    - `source`: addresses to which clients bind their sockets, by name of the client;
    - `beyond`: the result of packets from the node to load balancer addresses without a proxy;
    - `flags`: further flags of the agent;
    - `expected`: results that differ from kube-proxy's usual ones, by pattern (see `Flow.matches`).
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.node, self.router, self.outside = lab.node, lab.router, lab.outside
        self.second = lab.nodes[1].host
        self.a, self.pod = lab.pod("a"), lab.pod("p")
        self.d = lab.nodes[1].pod("d")
        self.clients = {"pod": self.pod, "node": self.node, "outside": self.outside}
        self.beyond = SILENT
        self.source_seen: dict[str, Pair] = {}
        self.families: tuple[str, ...] = FAMILIES
        self.changes: list[Callable[[], None]] = []
        node = Pair(self.node.v4, self.node.v6)
        self.addresses = dict.fromkeys(("pod", "node", "guest", "outside"), node)
        self.towards = {"here": lab.addresses.gateway(0), "there": node, "second": node}
        self.also_towards: Pair | None = None
        self.balancer: Callable[[int], Pair] = usual_balancer
        self.by_packet: set[str] = set()
        self.source: dict[str, Pair] = {}
        self.flags: list[str] = []
        self.expected: dict[str, str] = {}
        self._route()

    # What situations use

    @property
    def guest(self) -> Pod:
        """The guest, by default a container of Docker at a bridge that Docker masquerades."""
        if "guest" not in self.clients:
            gateway = Pair("172.17.0.1", "fd00:172:17::1")
            self.bridge("docker0", gateway)
            self.guest_at_bridge("docker0", gateway, 2)
            self.masquerade("docker0", Pair("172.17.0.0/16", "fd00:172:17::/64"))
        return self.clients["guest"]

    def in_cgroup(self, netns: Pod, cgroup: str) -> Pod:
        """The same network namespace with another cgroup of the node."""
        folder = self.lab.cgroup / cgroup
        folder.mkdir(parents=True)
        other = Pod(netns.name, netns.namespace, folder, netns.v4, netns.v6, netns.device)
        return self.lab._testbed._register(other)

    def guest_netns(self, pair: Pair, parent: Path | None = None) -> Pod:
        """The guest's network namespace, not yet connected. `parent`: of its cgroup; by default no pod's."""
        folder = parent or self.lab.cgroup / "machine.slice"
        guest = self.clients["guest"] = self.lab._testbed.create_netns("guest", folder, pair)
        self.lab.ip(guest, "link set lo up")
        return guest

    def bridge(self, name: str, gateway: Pair) -> None:
        self.ip(
            f"link add {name} type bridge",
            f"addr add {gateway.v4}/24 dev {name}",
            f"addr add {gateway.v6}/64 dev {name} nodad",
            f"link set {name} up",
        )

    def guest_at_bridge(
        self, bridge: str, gateway: Pair, host: int, device: str = "vguest", is_vm: bool = False
    ) -> Pod:
        """The guest at a bridge with the gateway's networks, /24 and /64. A VM has a tap device."""
        four, six = gateway.v4.rpartition(".")[0], gateway.v6.rpartition(":")[0]
        guest = self.guest_netns(Pair(f"{four}.{host}", f"{six}:{host:x}"))
        if is_vm:
            self.ip(f"tuntap add dev {device} mode tap")
            self.lab.ip(guest, "tuntap add dev eth0 mode tap")
        else:
            self.ip(f"link add {device} type veth peer name eth0 netns {guest.namespace}")
        self.ip(f"link set {device} master {bridge} up")
        self.lab.ip(
            guest,
            f"addr add {guest.v4}/24 dev eth0",
            f"addr add {guest.v6}/64 dev eth0 nodad",
            "link set eth0 up",
            f"route add default via {gateway.v4}",
            f"route add default via {gateway.v6}",
        )
        if is_vm:  # a device that is down rejects frames
            connect_taps(self.node, device, guest, "eth0")
        return guest

    def by_router(self, *rules: str) -> None:
        """Add routing rules for both families to the router."""
        for family, rule in itertools.product(("-4", "-6"), rules):
            self.router.run(["ip", family, "rule", "add", *rule.split()])

    def second_uplink(self, name: str = "eth1") -> Pair:
        """Add a link between the router and the node; return the node's address there.

        The router's end is `second`, with the address .254 and ::fe.
        """
        number = self.lab.number
        gateway = Pair(f"172.19.{number}.254", f"fd00:172:19:{number}::fe")
        own = Pair(f"172.19.{number}.2", f"fd00:172:19:{number}::2")
        self.lab.ip(
            self.router,
            f"link add second type veth peer name {name} netns {self.node.namespace}",
            f"addr add {gateway.v4}/24 dev second",
            f"addr add {gateway.v6}/64 dev second nodad",
            "link set second up",
        )
        self.ip(
            f"addr add {own.v4}/24 dev {name}",
            f"addr add {own.v6}/64 dev {name} nodad",
            f"link set {name} up",
        )
        return own

    def ip(self, *commands: str) -> None:
        """Commands of ip(8) on the node."""
        self.lab.ip(self.node, *commands)

    def sysctl(self, netns: Pod, *assignments: str) -> None:
        """Set values; each assignment is name=value."""
        for name, _, value in (each.partition("=") for each in assignments):
            netns.call(functools.partial(sysctl.ensure, name, value))

    def chain(
        self, table: str, hook: str, *rules: str, policy: str = "accept", netns: Pod | None = None
    ) -> None:
        """Add a table of nftables with one chain. `table`: family and name; `hook`: type, hook, priority."""
        lines = (f"table {table} {{", "chain each {", f"type {hook}; policy {policy}", *rules, "}", "}", "")
        (netns or self.node).run(["nft", "-f", "-"], stdin="\n".join(lines))

    def masquerade(self, device: str, networks: Pair) -> None:
        """Masquerade the guest's packets from these networks that leave the node by another device."""
        for table, word, network in (("ip nat4", "ip", networks.v4), ("ip6 nat6", "ip6", networks.v6)):
            rule = f'{word} saddr {network} oifname != "{device}" masquerade'
            self.chain(table, "nat hook postrouting priority srcnat", rule)
        self.expected = {"guest * here|there|local|second * *": HOST} | self.expected

    def expect(self, result: str, *patterns: str) -> None:
        self.expected |= dict.fromkeys(patterns, result)

    def expect_as_pod(self, client: str) -> None:
        """The client's results are those of a pod."""
        for flow, result in DEFAULTS.items():
            if flow.client == "pod":
                self.expect(result, str(flow._replace(client=client)))

    # The agent

    @contextlib.contextmanager
    def agent(self, mode: str, flags: tuple[str, ...]) -> Iterator[Agent]:
        folder = self.lab.folder / "manifests"
        folder.mkdir()
        self.write()
        if mode == "userspace":  # the relays connect, and the node's own routes apply
            self.towards = {place: own for place, own in self.towards.items() if " from " not in place}
        flags = (f"--proxy-mode={mode}", *flags, *self.flags)
        started = self.lab.agent(folder, *flags, wait=START_PATIENCE)
        try:
            yield started
        finally:
            started.kill()

    def write(self) -> None:
        """Write all objects with the present addresses."""
        manifests.write(self.lab.folder / "manifests" / "objects.yaml", *self._objects())

    def _objects(self) -> Iterator[manifests.Object]:
        second = Pair(self.second.v4, self.second.v6)
        for index, (pair, of) in enumerate(
            zip((self.addresses["node"], second), self.lab.nodes, strict=True)
        ):
            pods = self._of_families(self.lab.addresses.pods(index))
            yield manifests.node(of.name, self._of_families(pair), pod_cidrs=pods)
        for name in SERVICES:
            yield from self._service(name)

    def _service(self, name: str) -> Iterator[manifests.Object]:
        number = SERVICES.index(name) + 1
        node_port = NODE_PORTS[name]
        cluster, balancer = (self.frontend(kind, name) for kind in ("ClusterIP", "LoadBalancer"))
        service = manifests.service(
            name,
            self._of_families(cluster),
            [
                manifests.port(PORTS[name], name="tcp", node_port=node_port),
                manifests.port(PORTS[name], name="udp", protocol="UDP", node_port=node_port),
            ],
            type="LoadBalancer",
            externalTrafficPolicy="Local" if name in ("local", "away") else "Cluster",
        )
        ingress = [{"ip": address} for address in self._of_families(balancer)]
        service["status"] = {"loadBalancer": {"ingress": ingress}}
        yield service
        server = {"a": (self.a, self.lab.nodes[0]), "d": (self.d, self.lab.nodes[1])}.get(
            ENDPOINTS.get(name, "")
        )
        targets = [
            manifests.port(TCP_TARGET, name="tcp"),
            manifests.port(UDP_TARGET, name="udp", protocol="UDP"),
        ]
        for family in self.families if server else ():
            assert server
            pod, node = server
            yield manifests.endpoint_slice(
                f"{name}-{family}-{number}",
                name,
                [manifests.endpoint(getattr(pod, family), node=node.name)],
                targets,
            )

    def _of_families(self, pair: Pair) -> list[str]:
        return [getattr(pair, family) for family in self.families]

    # Flows

    def frontend(self, kind: str, service: str, client: str = "outside") -> Pair:
        if kind == "Address":
            return self.addresses[client] if service == "self" else Pair(self.second.v4, self.second.v6)
        number = SERVICES.index(service) + 1
        return {
            "ClusterIP": Pair(f"10.96.0.{number}", f"fd00:10:96::{number}"),
            "LoadBalancer": self.balancer(number),
            "NodePort": self.addresses[client],
        }[kind]

    def results_in_time(self, expected: Mapping[Flow, str]) -> dict[Flow, str]:
        """The expected results, or the last ones after PATIENCE."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.results(expected, PATIENCE / 5)) != expected and time.monotonic() < deadline:
            pass
        return found

    def results(self, expected: Mapping[Flow, str], timeout: float = ANSWERED) -> dict[Flow, str]:
        """The result of each of these flows: see `flows`. `timeout`: of expected answers, in seconds."""
        of_client: dict[str, list[Flow]] = {}
        for flow in expected:
            of_client.setdefault(flow.client, []).append(flow)

        def ask(client: str) -> list[str]:
            flows = of_client[client]
            dials = [self._dial(flow, expected[flow], timeout) for flow in flows]
            return outcomes(self.clients[client], dials)

        with concurrent.futures.ThreadPoolExecutor(len(of_client)) as threads:
            found = dict(zip(of_client, threads.map(ask, of_client), strict=True))
        return {
            flow: self._result(flow, text)
            for client, flows in of_client.items()
            for flow, text in zip(flows, found[client], strict=True)
        }

    def _dial(self, flow: Flow, expected: str, timeout: float) -> Dial:
        address = getattr(self.frontend(flow.frontend, flow.service, flow.client), flow.family)
        port = {"NodePort": NODE_PORTS, "Address": HOST_PORTS}.get(flow.frontend, PORTS)[flow.service]
        source = getattr(self.source.get(flow.client), flow.family, "")
        return Dial(flow.protocol, address, port, SILENCE if expected == SILENT else timeout, (source, 0))

    def _result(self, flow: Flow, text: str) -> str:
        """The answer in the words of the table; an unexpected endpoint or address is named."""
        name, _, source = text.partition(" ")
        if not source:
            return text
        client = self.clients[flow.client]
        place = {"a": "here", "host-2": "second"}.get(name, "there")
        own = self.towards.get(f"{place} from {flow.client}", self.towards[place])
        names = {getattr(each, flow.family): NODE for each in (own, self.also_towards) if each}
        if flow.client != "node" or flow.client in self.source:
            seen = self.source_seen.get(flow.client) or self.source.get(flow.client) or client
            names[getattr(seen, flow.family)] = CLIENT
        known = names.get(source, source)
        return known if name == ENDPOINTS[flow.service] else f"{name} {known}"

    # The network

    def _route(self) -> None:
        """As `TwoNodes.route`: the router sends packets of the client outside for Services to the node."""
        for network, gateway in zip(SERVICE_NETWORKS, (self.node.v4, self.node.v6), strict=True):
            self.lab.ip(
                self.router,
                f"route add blackhole {network}",
                f"route add {network} via {gateway} table 100",
            )
            family = "-6" if ":" in network else "-4"
            self.router.run(["ip", family, "rule", "add", "iif", "outside", "lookup", "100"])
        for netns in (self.node, self.second):
            self.sysctl(netns, "net/ipv4/icmp_ratelimit=0", "net/ipv6/icmp/ratelimit=0")

    def serve(self) -> None:
        for pod in (self.a, self.d):
            for protocol, port in ((Protocol.TCP, TCP_TARGET), (Protocol.UDP, UDP_TARGET)):
                pod.serve_echo(protocol, port)
        for host in (self.node, self.second):
            host.serve_echo(Protocol.TCP, HOST_PORTS["self"])


def outcomes(netns: Netns, dials: Sequence[Dial]) -> list[str]:
    """As `clients.outcomes`, with RESET."""
    create = creating_in(netns)

    def outcome(dial: Dial) -> str:
        try:
            return clients.outcome_of(dial, create)
        except ConnectionResetError:
            return RESET

    with concurrent.futures.ThreadPoolExecutor(len(dials)) as threads:
        return list(threads.map(outcome, dials))


def usual_balancer(number: int) -> Pair:
    """The load balancer addresses of the Service with this number, from 1."""
    return Pair(f"10.99.0.{number}", f"fd00:10:96:2::{number}")


Situation = Callable[[Zoo], None]
"""Changes the base node before the agent starts. The first line of its docstring says what is special."""


@contextlib.contextmanager
def zoo(situation: Situation) -> Iterator[Zoo]:
    with Lab("test-zoo", 78, PodNetwork.ROUTED) as lab:
        made = Zoo(lab)
        situation(made)
        assert made.guest
        made.serve()
        yield made
