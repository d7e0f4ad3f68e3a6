"""Three nodes with direct server return, and a client outside: real packets, without agents.

The entries of each node are applied by a backend that is closed afterwards, since its pinned programs and
maps remain in force. Each node has one pod, a server. The router sends the client's packets to the node that
a test dials. The reverse path filter is strict everywhere but at the router: it receives replies of a
frontend from other nodes than the one to which it sends.
"""

import dataclasses
import functools
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.backend import EbpfBackend
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.lab import Lab, Node, Pod
from ebpfproxy.linux.netlink import geneve, links, local_addresses
from ebpfproxy.model.address import (
    Family,
    Protocol,
    family,
    format_address,
    parse_address,
    parse_network,
)
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.endpoint import EndpointPort, EndpointSlice
from ebpfproxy.model.service import Service, ServiceType
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.node_plan import plan_node
from ebpfproxy.plan.service_plan import DetectLocal, PlanContext, ServicePortPlan
from tests.support import build

VIP = {"v4": "10.99.0.7", "v6": "fd00:10:96:99::7"}
PORTS = {Protocol.TCP: 80, Protocol.UDP: 53}
TARGETS = {Protocol.TCP: 8080, Protocol.UDP: 5353}
NODE_PORTS = {Protocol.TCP: 30080, Protocol.UDP: 30053}
_NODE_NETWORK = {"v4": 32, "v6": 128}
_SIZES = MapSizes(64, 1 << 16, 1024, 64, 64, 4096, 64, tunneled_flows=1024)
_U32 = struct.Struct("=I")


class DsrNodes:
    """The nodes are a, b and c: `dial` decides which of them gets the client's packets."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.nodes = lab.nodes
        self.x = lab.outside
        self.pods = [node.pod(f"server-{node.index}") for node in lab.nodes]
        for pod in self.pods:
            for protocol, port in TARGETS.items():
                pod.serve_echo(protocol, port)
        for each in (self.x, *(node.host for node in lab.nodes), *self.pods):
            each.call(functools.partial(_filter_reverse_paths, 1))
        lab.router.call(functools.partial(_filter_reverse_paths, 0))
        self.dial(self.nodes[0])

    def dial(self, node: Node) -> None:
        """From now on the client's packets to the frontends reach this node."""
        vias = ((vip, getattr(node.host, name)) for name, vip in VIP.items())
        self.lab.ip(self.lab.router, *(f"route replace {vip} via {via}" for vip, via in vias))

    def serve(
        self,
        endpoints: Collection[Pod],
        nodes: Iterable[Node] | None = None,
        announcing: Collection[Node] | None = None,
        ports: Mapping[Node, int] | None = None,
        **fields: object,
    ) -> None:
        """Put a Service with these endpoints in force at the nodes, by default all.

        `announcing`: the nodes that accept tunneled packets, by default all. `ports`: of their Geneve device.
        """
        announcing = self.nodes if announcing is None else announcing
        for node in self.nodes if nodes is None else nodes:
            port = (ports or {}).get(node, geneve.PORT if node in announcing else 0)
            apply = functools.partial(self._apply, node, port, endpoints, announcing, fields)
            node.host.call(apply, timeout=300)

    def _apply(
        self,
        node: Node,
        port: int,
        endpoints: Collection[Pod],
        announcing: Collection[Node],
        fields: Mapping[str, object],
    ) -> None:
        settings = EbpfSettings(node.cgroup, node.bpffs, sizes=_SIZES, dsr_port=port)
        context = PlanContext(node.name, detect_local=DetectLocal.INTERFACE_NAME_PREFIX, pod_interface="veth")
        own = dataclasses.replace(build.node(addresses=(node.host.v4, node.host.v6)), name=node.name)
        state = ClusterState({}, {}, own, local_addresses.read(), links.read())
        plan = plan_node(state, context, pods=False)
        sources = {
            parse_network(f"{getattr(each.host, name)}/{length}")
            for each in self.nodes
            for name, length in _NODE_NETWORK.items()
        }
        plan = dataclasses.replace(plan, tunnel_sources=frozenset(sources))
        plans = plan_service(self._service(fields), self._slices(endpoints), own, context)
        backend = EbpfBackend(settings)
        backend.open()
        try:
            wanted = backend.render([self._tunneled(node, each, announcing) for each in plans], plan)
            rejected = backend.apply(diff(backend.read(), wanted))
            assert not rejected, rejected
            assert backend.read() == wanted
            assert all(backend.check(wanted))
        finally:
            backend.close()

    @staticmethod
    def _service(fields: Mapping[str, object]) -> Service:
        ports = [
            build.port(number, each.name.lower(), protocol=each, node_port=NODE_PORTS[each])
            for each, number in PORTS.items()
        ]
        given: dict[str, object] = {
            "ips": ["10.96.0.10", "fd00:96::10"],
            "balancer": list(VIP.values()),
            "type_": ServiceType.LOAD_BALANCER,
        } | dict(fields)
        return build.service("web", *ports, **given)  # type: ignore[arg-type]

    def _slices(self, endpoints: Collection[Pod]) -> tuple[EndpointSlice, ...]:
        ports = [EndpointPort(each.name.lower(), each, number) for each, number in TARGETS.items()]
        return tuple(
            build.slice_of(
                "web",
                *(build.endpoint(getattr(pod, name), self._node_of(pod).name) for pod in endpoints),
                ports=ports,
            )
            for name in VIP
        )

    def _node_of(self, pod: Pod) -> Node:
        return next(node for node in self.nodes if pod in node.pods.values())

    def _tunneled(self, node: Node, plan: ServicePortPlan, announcing: Collection[Node]) -> ServicePortPlan:
        """The plan as the control plane makes it for direct server return."""
        places = {pod.v4: each for each in self.nodes for pod in each.pods.values()}
        places |= {pod.v6: each for each in self.nodes for pod in each.pods.values()}
        tunnels = []
        for endpoint in plan.endpoints:
            of = places[format_address(endpoint.address)]
            name = "v4" if family(endpoint.address) is Family.IPV4 else "v6"
            accepts = of is not node and of in announcing
            tunnels.append(parse_address(getattr(of.host, name)) if accepts else None)
        balancing = plan.balancing._replace(algorithm=Algorithm.MAGLEV, tunnels=tuple(tunnels))
        return dataclasses.replace(plan, balancing=balancing)

    def counters(self, node: Node) -> dict[str, int]:
        """The counters of a node that are not 0, by name."""
        maps = Maps(Pins(node.bpffs).hooked_in() / "maps")
        try:
            values = {_U32.unpack(key)[0]: value for key, value in maps["counters"].items()}
        finally:
            maps.close()
        sums = {i: sum(struct.unpack(f"={len(v) // 8}Q", v)) for i, v in values.items()}
        return {abi.COUNTERS[i]: n for i, n in sums.items() if n and i in abi.COUNTERS}


def bytes_sent(node: Node) -> int:
    """The bytes that a node's uplink has sent."""
    lines = node.host.run(["cat", "/proc/net/dev"]).stdout.splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def has_geneve() -> bool:
    """Whether this kernel has Geneve devices."""
    probe = ["ip", "link", "add", "probe-geneve", "type", "geneve", "external"]
    with Lab("test-geneve", 203) as lab:
        return lab.node.run(probe, check=False).returncode == 0


def _filter_reverse_paths(value: int) -> None:
    """Set rp_filter of all present and future devices."""
    for setting in Path("/proc/sys/net/ipv4/conf").glob("*/rp_filter"):
        setting.write_text(str(value))
