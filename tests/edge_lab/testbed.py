"""The testbed of `make edge-lab`: a client, a router, two edges and two nodes with pods."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator

from ebpfproxy.api import fields
from ebpfproxy.lab import Agent, Lab, api_server, manifests
from ebpfproxy.linux.netlink import geneve
from tests.edge_lab import echo, frr
from tests.edge_lab.frr import Frr, await_true
from tests.edge_lab.load import Target

PODS = 2  # of each node
PORTS = range(8080, 8084)
"""The ports of the pods. The Service has the same."""

_START = 300.0  # seconds until the first sync of an agent, which may compile the programs

_SILENCE = """
table netdev silence {{
  chain received {{
    type filter hook ingress device "{device}" priority 0; policy drop;
  }}
  chain sent {{
    type filter hook egress device "{device}" priority 0; policy drop;
  }}
}}
"""


class EdgeTestbed:
    """Both edges announce the VIPs, and both nodes have an agent, too.

    `dsr`: with direct server return. `slow`: with long timers of BGP and BFD.
    """

    def __init__(self, lab: Lab, *, dsr: bool, slow: bool) -> None:
        self.lab = lab
        self.vips = lab.addresses.vip(1)
        self._flags = [f"--ebpf-dsr-port={geneve.PORT}"] if dsr else []
        sources = ",".join(f"{edge.host.v4}/32" for edge in lab.edges)
        of_nodes = [f"--ebpf-dsr-sources={sources}"] if dsr else []
        self._master = f"--master=http://{lab.addresses.router.v4}:{api_server.PORT}"
        pods = [node.pod(f"p{node.index}{number}") for node in lab.nodes for number in range(PODS)]
        for pod in pods:
            for port in PORTS:
                echo.start(pod, port)
        api_server.start(lab.router, lab.folder, *self._objects(dsr), address=lab.addresses.router.v4)
        lab.router.run(["sysctl", "-qw", "net.ipv4.fib_multipath_hash_policy=1"])
        # The kernel of the router does not wait for its routing daemon when a carrier is lost.
        of_edges = [f"net.ipv4.conf.{each.cgroup.name}" for each in lab.edges]
        lab.router.run(["sysctl", "-qw", *(f"{each}.ignore_routes_with_linkdown=1" for each in of_edges)])
        # The router receives replies from a VIP from nodes, while its routes to the VIP lead to edges.
        devices = ["all", *(node.cgroup.name for node in lab.nodes)]
        lab.router.run(["sysctl", "-qw", *(f"net.ipv4.conf.{each}.rp_filter=0" for each in devices)])
        for pair in lab.addresses.further(16):
            lab.ip(lab.outside, f"addr add {pair.v4}/32 dev lo")
        for node in lab.nodes:
            flags = [self._master, "--healthz-bind-address=0.0.0.0:10256", *self._flags, *of_nodes]
            node.agent(lab.folder, "--manifests=", *flags, wait=_START)
        self.agents = [self.start_agent(index) for index in range(len(lab.edges))]
        adapted = frr.slowed if slow else str
        of_router = adapted(frr.of_router(lab.addresses, len(lab.edges)))
        self.router = Frr(lab.router, lab.folder / "router", of_router)
        self.daemons = [
            Frr(edge.host, lab.folder / edge.name, adapted(frr.of_edge(lab.addresses, edge.index)))
            for edge in lab.edges
        ]
        self.await_edges(len(lab.edges))

    @property
    def sources(self) -> list[str]:
        """The addresses of the client."""
        return [self.lab.outside.v4, *(pair.v4 for pair in self.lab.addresses.further(16))]

    @property
    def targets(self) -> list[Target]:
        return [(self.vips.v4, port) for port in PORTS]

    def start_agent(self, edge: int) -> Agent:
        flags = ["--role=edge", f"--edge-vip-cidrs={','.join(self.lab.addresses.vips)}", *self._flags]
        return self.lab.edges[edge].agent(self.lab.folder, "--manifests=", self._master, *flags, wait=_START)

    def next_hops(self, vip: str) -> int:
        """The number of edges that the router uses for a VIP."""
        family = "-6" if ":" in vip else "-4"
        shown = self.lab.router.run(["ip", family, "-j", "route", "show", vip]).stdout
        hops = [hop for route in json.loads(shown) for hop in route.get("nexthops", [route])]
        return sum("linkdown" not in hop.get("flags", []) for hop in hops)

    def await_edges(self, count: int) -> None:
        """Wait until the router uses so many edges for the VIPs of both families."""
        for vip in self.vips:
            await_true(lambda of=vip: self.next_hops(of) == count, f"the router uses {count} edges for {vip}")

    @contextlib.contextmanager
    def drained(self, edge: int) -> Iterator[float]:
        """Drain an edge in the block, and start its agent after it. Yield when SIGTERM was sent."""
        agent = self.agents[edge]
        sent = time.monotonic()
        agent.process.send_signal(signal.SIGTERM)
        yield sent
        agent.process.send_signal(signal.SIGTERM)
        agent.process.wait(30)
        self.agents[edge] = self.start_agent(edge)

    @contextlib.contextmanager
    def unplugged(self, edge: int) -> Iterator[float]:
        """Take the link of an edge down in the block, which the router sees. Yield when."""
        host = self.lab.edges[edge].host
        began = time.monotonic()
        self.lab.ip(host, "link set eth0 down")
        yield began
        link = self.lab.addresses.edge_link(edge)
        self.lab.ip(
            host,
            "link set eth0 up",
            f"addr replace {link.edge.v6}/127 dev eth0 nodad",
            f"route replace default via {link.router.v4}",
            f"route replace default via {link.router.v6}",
        )

    @contextlib.contextmanager
    def silent(self, edge: int) -> Iterator[float]:
        """Lose all packets of an edge in the block, as if its machine had died. Yield when."""
        began = time.monotonic()
        text = _SILENCE.format(device=self.lab.edges[edge].cgroup.name)
        self.lab.router.run(["nft", "-f", "-"], stdin=text)
        yield began
        self.lab.router.run(["nft", "delete table netdev silence"])

    def _objects(self, dsr: bool) -> Iterator[manifests.Object]:
        annotations = {"ebpfproxy/lb-algorithm": "maglev"}
        annotations |= {"ebpfproxy/ebpf-forwarding": "dsr"} if dsr else {}
        ports = [manifests.port(port, name=f"p{port}", target=port) for port in PORTS]
        addresses = ["10.96.0.10", "fd00:10:96::a"]
        service = manifests.service("web", addresses, ports, annotations=annotations, type="LoadBalancer")
        service["status"] = {"loadBalancer": {"ingress": [{"ip": vip} for vip in self.vips]}}
        yield service
        for family in self.vips._fields:
            endpoints = [
                manifests.endpoint(getattr(pod, family), node=node.name)
                for node in self.lab.nodes
                for pod in node.pods.values()
            ]
            yield manifests.endpoint_slice(f"web-{family}", "web", endpoints, ports)
        for node in self.lab.nodes:
            # As the agent writes it.
            announced = {fields.DSR_PORT: str(geneve.PORT)} if dsr else {}
            yield manifests.node(node.name, [node.host.v4, node.host.v6], annotations=announced)
