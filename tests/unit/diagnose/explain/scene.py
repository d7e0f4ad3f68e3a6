"""Situations for tests, planned without a machine."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ebpfproxy.api.event import Unserved
from ebpfproxy.diagnose.cluster import Cluster
from ebpfproxy.diagnose.explain.connection import explain
from ebpfproxy.diagnose.explain.origin import ANY_POD, Origin
from ebpfproxy.diagnose.explain.result import ClientClass, Destination, Explanation
from ebpfproxy.diagnose.situation import Situation, plan_situation
from ebpfproxy.linux.netlink.routing import Route
from ebpfproxy.model.address import Address, Network, Protocol, parse_address
from ebpfproxy.model.cluster import ClusterState, Full, Listening
from ebpfproxy.model.device import ETHERNET, Device
from ebpfproxy.model.endpoint import EndpointPort, Endpoints, EndpointSlice
from ebpfproxy.model.namespace import Link, Namespace
from ebpfproxy.model.node import PeerNode
from ebpfproxy.model.pod import Pod as KubernetesPod
from ebpfproxy.model.service import NamespacedName, Service
from ebpfproxy.plan.host_ports import name_of
from ebpfproxy.plan.reason import AnyReason
from ebpfproxy.plan.service_plan import DetectLocal, PlanContext
from tests.support.build import HERE, networks, node, slice_of

NODE, NODE_V6 = "192.0.2.10", "2001:db8::10"
POD, OTHER_POD, REMOTE_POD = "10.1.0.7", "10.1.0.8", "10.1.9.1"
OUTSIDE = "198.51.100.1"
CLUSTER_IP = "10.96.0.10"

DEVICES = (
    Device(2, "eth0", "", ETHERNET, True, addresses=(parse_address(NODE),), default_route=True),
    Device(7, "veth7", "veth", ETHERNET, True, addresses=(parse_address("10.1.0.1"),), peer_elsewhere=True),
)

NAMESPACES = tuple(
    Namespace(cookie, Link.NODE, frozenset({7}), frozenset({parse_address(address)}), "pod-uid", ("eth0",))
    for cookie, address in ((7, POD), (8, OTHER_POD))
)
"""Those of the pods, which the socket path serves."""

A_POD = Origin(ClientClass.POD, POD, (parse_address(POD),), "veth7", 7)
THE_NODE = Origin(ClientClass.NODE, "node")
A_CLIENT = Origin(ClientClass.OUTSIDE, OUTSIDE, (parse_address(OUTSIDE),))


def route(address: Address) -> Route:
    """Pods of this node are behind veth7, everything else behind eth0."""
    if address in (parse_address(POD), parse_address(OTHER_POD)):
        return Route(7, parse_address("10.1.0.1"))
    return Route(2, parse_address(NODE))


def situation(
    *objects: Service | EndpointSlice | KubernetesPod,
    mode: str = "ebpf",
    zone: str = "",
    unserved: Mapping[NamespacedName, Unserved] | None = None,
    routes: Any = route,
    devices: Sequence[Device] = DEVICES,
    peers: Mapping[str, PeerNode] | None = None,
    service_cidrs: Sequence[str] = (),
    listening: Listening | None = None,
    namespaces: tuple[Namespace, ...] = NAMESPACES,
    full: Full | None = None,
    **options: Any,
) -> Situation:
    """The situation of the node `here` with these Services and EndpointSlices. `options`: of PlanContext."""
    services = {each.name: each for each in objects if isinstance(each, Service)}
    slices: dict[NamespacedName, tuple[EndpointSlice, ...]] = {}
    for each in objects:
        if isinstance(each, EndpointSlice):
            pods_ = Endpoints(endpoint._replace(own_pod=True) for endpoint in each.endpoints)
            of_pods = dataclasses.replace(each, endpoints=pods_)
            slices[each.service] = (*slices.get(each.service, ()), of_pods)
    local = networks(["127.0.0.0/8", "::1/128", f"{NODE}/32", f"{NODE_V6}/128", "10.1.0.1/32"])
    pods = {name_of(each.name): each for each in objects if isinstance(each, KubernetesPod)}
    state = ClusterState(
        services,
        slices,
        node(zone, (NODE, NODE_V6)),
        frozenset[Network](local),
        tuple(devices),
        pods=pods,
        peers=peers or {},
        service_cidrs=frozenset(networks(service_cidrs)),
        node_addresses=frozenset(address for each in (peers or {}).values() for address in each.addresses),
        listening=listening or {},
        namespaces=namespaces,
        full=full or {},
    )
    if mode != "ebpf":
        options.setdefault("detect_local", DetectLocal.CLUSTER_CIDR)
        options.setdefault("cluster_cidrs", networks(["10.1.0.0/16", "fd01::/64"]))
    options.setdefault("service_forwarding", True)
    context = PlanContext(HERE, **options)
    return plan_situation(Cluster(state, (), unserved or {}), context, mode, routes=routes)


def to(address: str = CLUSTER_IP, port: int = 80, protocol: Protocol | None = Protocol.TCP) -> Destination:
    return Destination(parse_address(address), port, protocol)


def ping(address: str) -> Destination:
    return to(address, 0, None)


def explained(of: Situation, destination: Destination | None = None, origin: Origin = ANY_POD) -> Explanation:
    return explain(of, origin, destination or to())


def reasons(explanation: Explanation) -> set[AnyReason]:
    """All reasons: of steps, of endpoints and of masquerading."""
    found: set[AnyReason] = {step.reason for step in explanation.steps}
    found |= {each.reason for each in explanation.endpoints}
    if explanation.path and explanation.path.exception:
        found.add(explanation.path.exception)
    return found | {each.why_masquerade for each in explanation.endpoints if each.why_masquerade}


def slice_with(protocol: Protocol, port: int, *endpoints: Any, of: str = "web") -> EndpointSlice:
    return slice_of(of, *endpoints, ports=(EndpointPort("", protocol, port),))
