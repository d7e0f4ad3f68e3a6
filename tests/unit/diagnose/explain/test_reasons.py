"""Every reason, each with a connection that has it, and what happens to that connection."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from ebpfproxy.api.event import Unserved
from ebpfproxy.diagnose.explain.hashes import BY_NETNS, BY_PORT, BY_RANDOM
from ebpfproxy.diagnose.explain.origin import ANY_POD, Origin
from ebpfproxy.diagnose.explain.reasons import BY_SUBJECT, Reason
from ebpfproxy.diagnose.explain.result import ClientClass, Destination, Explanation, Step, Verdict, Via
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.linux.netlink.routing import Route
from ebpfproxy.model.address import Family, Protocol, parse_address, parse_network
from ebpfproxy.model.balancing import Algorithm, Balancing, EbpfForwarding, Forwarding, parse_weights
from ebpfproxy.model.device import OnLinkRoute
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.model.namespace import Link, Namespace
from ebpfproxy.model.node import PeerNode
from ebpfproxy.model.pod import HostPort, Pod
from ebpfproxy.model.service import RemovedEndpoints, ServicePortName, ServiceType, TrafficPolicy
from ebpfproxy.plan.endpoint_reasons import EndpointReason
from ebpfproxy.plan.endpoints import API_SERVER
from ebpfproxy.plan.planned_endpoints import target_of
from ebpfproxy.plan.protected_addresses import Protected
from ebpfproxy.plan.reason import AnyReason
from ebpfproxy.plan.service_plan import DetectLocal, Protection, SocketLb
from tests.support.build import ELSEWHERE, HERE, draining, endpoint, name, networks, port, service, slice_of
from tests.unit.diagnose.explain.scene import (
    A_CLIENT,
    A_POD,
    CLUSTER_IP,
    DEVICES,
    NODE,
    OTHER_POD,
    OUTSIDE,
    POD,
    REMOTE_POD,
    THE_NODE,
    explained,
    ping,
    reasons,
    situation,
    slice_with,
    to,
)

CONNECTS, REJECTED, DROPPED = Verdict.CONNECTS, Verdict.REJECTED, Verdict.DROPPED
ROUTED, REACHES_NODE, ANSWERED = Verdict.ROUTED, Verdict.REACHES_NODE, Verdict.ANSWERED
LOCAL = TrafficPolicy.LOCAL
BALANCER, EXTERNAL = "203.0.113.1", "203.0.113.2"

WEB = service()
HOST_PORT_POD = Pod(name("web-0"), (parse_address(POD),), (HostPort(None, 8443, Protocol.TCP, 8080),))
WEIGHTED = dataclasses.replace(WEB, balancing=Balancing(weights=parse_weights(f"{REMOTE_POD}=0")))
ROUTED_WEB, TUNNELED_WEB = (
    dataclasses.replace(
        service("web", port(8080), external=["203.0.113.3"]), balancing=Balancing(forwarding=each)
    )
    for each in (Forwarding.DIRECT_ROUTING, Forwarding.TUNNEL)
)
FORWARDED = to("203.0.113.3", 8080)
ROUND_ROBIN = dataclasses.replace(
    WEB, balancing=Balancing(Algorithm.ROUND_ROBIN, parse_weights(f"{REMOTE_POD}=3"))
)
ON_LINK = (DEVICES[0]._replace(on_link=(OnLinkRoute(254, networks(["203.0.113.0/24"])[0]),)),)
DSR_WEB = dataclasses.replace(ROUTED_WEB, balancing=Balancing(ebpf_forwarding=EbpfForwarding.DSR))
LEAST_CONNECTIONS = dataclasses.replace(WEB, balancing=Balancing(Algorithm.LEAST_CONNECTIONS))
HEAVY = dataclasses.replace(WEB, balancing=Balancing(weights=parse_weights(f"{REMOTE_POD}=3")))
RESETTING = dataclasses.replace(WEB, removed_endpoints=RemovedEndpoints.RESET)
REBALANCED = dataclasses.replace(WEB, rebalance=10)
FULL = {
    (ServicePortName("default", "web", "", Protocol.TCP), Family.IPV4): frozenset(
        [target_of(parse_address(POD), 8080)]
    )
}
READY = slice_of("web", endpoint(REMOTE_POD), endpoint(OTHER_POD, HERE))
PEERS = {ELSEWHERE: PeerNode((parse_address("192.0.2.11"),), 6083)}
WITH_TUNNEL = situation(DSR_WEB, READY, peers=PEERS, dsr_port=6083)
NODE_PORT_WEB = service("web", port(80, node_port=30080), type_=ServiceType.NODE_PORT)
LOCAL_WEB = service("web", port(80, node_port=30080), type_=ServiceType.NODE_PORT, external_policy=LOCAL)
INTERNAL_LOCAL = service("web", internal_policy=LOCAL)
RANGED = service("web", balancer=[BALANCER], ranges=["198.51.100.0/24"], type_=ServiceType.LOAD_BALANCER)
REMOTE = slice_of("web", endpoint(REMOTE_POD))
DEAD = endpoint(REMOTE_POD, ready=False, serving=False)
OWN_EXTERNAL = service("web", port(30080), external=[NODE], type_=ServiceType.LOAD_BALANCER)
AT_30080 = {(Protocol.TCP, 30080): frozenset([parse_address("0.0.0.0")])}
API_ENDPOINT = slice_of(str(API_SERVER), endpoint(OUTSIDE), ports=(EndpointPort("", Protocol.TCP, 6443),))
OTHERS_NODE_PORT = service("zoo", port(80, node_port=30080), ips=["10.96.0.11"], type_=ServiceType.NODE_PORT)
CHECKED = service(
    "web",
    balancer=[BALANCER],
    type_=ServiceType.LOAD_BALANCER,
    external_policy=LOCAL,
    health_check=32000,
)
SCTP = service("web", port(80, protocol=Protocol.SCTP))
UDP = service("web", port(80, protocol=Protocol.UDP))

CIDR = "10.96.0.0/16"


class Case(NamedTuple):
    """A connection in a situation, and what happens to it."""

    verdict: Verdict
    objects: tuple[Any, ...]
    settings: Mapping[str, Any]
    dials: Destination
    by: Origin

    def explained(self) -> Explanation:
        return explained(situation(*self.objects, **self.settings), self.dials, self.by)


def case(
    verdict: Verdict, *objects: Any, dials: Destination | None = None, by: Origin = ANY_POD, **settings: Any
) -> Case:
    """By default a pod dials the ClusterIP. `objects` and `settings`: those of `situation`."""
    return Case(verdict, objects, settings, dials or to(), by)


CASES: dict[AnyReason, Case] = {
    # Client
    Reason.IS_NODE: case(CONNECTS, WEB, READY, by=THE_NODE),
    Reason.POD_BY_DEVICE: case(CONNECTS, WEB, READY, by=A_POD),
    Reason.POD_BY_NETWORK: case(CONNECTS, WEB, READY, by=A_POD, mode="nftables"),
    Reason.POD_BY_INTERFACE: case(
        CONNECTS,
        WEB,
        READY,
        by=A_POD,
        mode="nftables",
        detect_local=DetectLocal.INTERFACE_NAME_PREFIX,
        pod_interface="veth",
    ),
    Reason.NOT_DETECTED_AS_POD: case(
        CONNECTS,
        WEB,
        READY,
        by=A_POD,
        mode="nftables",
        detect_local=DetectLocal.BRIDGE_INTERFACE,
        pod_interface="cni0",
    ),
    Reason.NO_DETECTION: case(CONNECTS, WEB, READY, by=A_POD, mode="nftables", cluster_cidrs=()),
    Reason.IS_OUTSIDE: case(CONNECTS, WEB, READY, by=A_CLIENT),
    # Path
    Reason.CONNECT_HOOK: case(CONNECTS, WEB, READY, by=A_POD),
    Reason.SENDMSG_HOOK: case(
        CONNECTS, UDP, slice_with(Protocol.UDP, 53, endpoint(POD)), dials=to(protocol=Protocol.UDP)
    ),
    Reason.INGRESS_OF_POD: case(CONNECTS, WEB, READY, by=A_POD, socket_lb=SocketLb.OFF),
    Reason.INGRESS_OF_UPLINK: case(CONNECTS, WEB, READY, by=A_CLIENT),
    Reason.EGRESS_OF_DEVICE: case(CONNECTS, WEB, READY, by=THE_NODE, socket_lb=SocketLb.OFF),
    Reason.ROUTE_OF_FRONTEND: case(
        CONNECTS,
        service("web", external=[EXTERNAL]),
        READY,
        dials=to(EXTERNAL),
        by=THE_NODE,
        socket_lb=SocketLb.OFF,
        devices=ON_LINK,
    ),
    Reason.RANGES_NEED_PACKETS: case(DROPPED, RANGED, READY, dials=to(BALANCER), by=A_POD),
    Reason.SCTP_NEEDS_PACKETS: case(
        CONNECTS,
        SCTP,
        slice_with(Protocol.SCTP, 80, endpoint(POD)),
        dials=to(protocol=Protocol.SCTP),
        by=A_POD,
    ),
    Reason.SOCKET_LB_OFF: case(CONNECTS, WEB, READY, by=A_POD, socket_lb=SocketLb.HOST),
    Reason.POD_BYPASSES_HOOKS: case(CONNECTS, WEB, READY, by=A_POD._replace(bypasses_hooks=True)),
    Reason.NAMESPACE_NEEDS_PACKETS: case(CONNECTS, WEB, READY, by=A_POD._replace(cookie=99)),
    Reason.NO_DEVICE_PASSED: case(
        REACHES_NODE,
        service("web", balancer=[NODE], ranges=["198.51.100.0/24"], type_=ServiceType.LOAD_BALANCER),
        READY,
        dials=to(NODE),
        by=THE_NODE,
    ),
    Reason.NAT_PREROUTING: case(CONNECTS, WEB, READY, by=A_POD, mode="iptables"),
    Reason.NAT_OUTPUT: case(CONNECTS, WEB, READY, by=THE_NODE, mode="nftables"),
    Reason.FLOWTABLE: case(
        CONNECTS, WEB, READY, by=A_POD, mode="nftables", flowtable_patterns=("eth*", "veth*")
    ),
    Reason.VIRTUAL_SERVER: case(CONNECTS, WEB, READY, by=A_POD, mode="ipvs"),
    Reason.RELAY: case(CONNECTS, WEB, READY, by=A_POD, mode="userspace"),
    # Frontend
    Reason.CLUSTER_IP: case(CONNECTS, WEB, READY),
    Reason.EXTERNAL_IP: case(CONNECTS, service("web", external=[EXTERNAL]), READY, dials=to(EXTERNAL)),
    Reason.LOAD_BALANCER_IP: case(
        CONNECTS,
        service("web", balancer=[BALANCER], type_=ServiceType.LOAD_BALANCER),
        READY,
        dials=to(BALANCER),
    ),
    Reason.NODE_PORT: case(CONNECTS, NODE_PORT_WEB, READY, dials=to(NODE, 30080)),
    Reason.WON_CLAIM: case(CONNECTS, WEB, READY, service("zoo", ips=["10.96.0.11"], external=[CLUSTER_IP])),
    Reason.NODE_PORT_INSTEAD: case(
        CONNECTS,
        OWN_EXTERNAL,
        OTHERS_NODE_PORT,
        slice_of("zoo", endpoint(REMOTE_POD)),
        dials=to(NODE, 30080),
        by=A_CLIENT,
        mode="nftables",
    ),
    Reason.PORT_NOT_SERVED: case(ROUTED, WEB, READY, dials=to(port=81)),
    Reason.SCTP_UNSERVED: case(
        ROUTED,
        SCTP,
        slice_with(Protocol.SCTP, 80, endpoint(POD)),
        dials=to(protocol=Protocol.SCTP),
        mode="nftables",
        sctp_unserved="no SCTP",
    ),
    Reason.UNUSED_PORT_REJECTED: case(REJECTED, WEB, READY, dials=to(port=81), mode="nftables"),
    Reason.UNALLOCATED_CLUSTER_IP: case(
        DROPPED, WEB, READY, dials=to("10.96.9.9"), mode="nftables", service_cidrs=[CIDR]
    ),
    Reason.UNUSED_PORT_ON_NODE: case(REJECTED, WEB, READY, dials=to(port=81), mode="ipvs"),
    Reason.ADDRESS_EXCLUDED: case(
        REACHES_NODE, NODE_PORT_WEB, READY, dials=to(NODE, 30080), node_port_cidrs=networks(["10.0.0.0/8"])
    ),
    Reason.LOOPBACK_EXCLUDED: case(
        REACHES_NODE, NODE_PORT_WEB, READY, dials=to("127.0.0.1", 30080), by=THE_NODE, mode="ipvs"
    ),
    Reason.OTHER_LOOPBACK: case(ROUTED, NODE_PORT_WEB, READY, dials=to("127.0.0.1", 30080), by=A_POD),
    Reason.NOT_THIS_NODE: case(ROUTED, NODE_PORT_WEB, READY, dials=to("192.0.2.11", 30080)),
    Reason.HEALTH_CHECK_NODE_PORT: case(ANSWERED, CHECKED, READY, dials=to(NODE, 32000)),
    Reason.ENDPOINT_ADDRESS: case(ROUTED, WEB, READY, dials=to(REMOTE_POD, 8080)),
    Reason.ECHO_REQUEST: case(ANSWERED, WEB, READY, dials=ping(CLUSTER_IP)),
    Protected.OF_API_SERVER: case(
        ROUTED,
        OWN_EXTERNAL,
        API_ENDPOINT,
        service("zoo", external=[OUTSIDE]),
        dials=to(OUTSIDE, 80),
        by=A_POD,
    ),
    Protected.OF_HOST_PROCESS: case(
        REACHES_NODE, OWN_EXTERNAL, READY, dials=to(NODE, 30080), listening=AT_30080
    ),
    Protected.OF_LOCAL_SERVER: case(
        REACHES_NODE,
        service("dns", ips=["10.1.0.1"]),
        dials=to("10.1.0.1"),
        by=A_POD,
        listening={(Protocol.TCP, 80): frozenset([parse_address("10.1.0.1")])},
    ),
    Protected.OUTSIDE_NETWORKS: case(
        ROUTED,
        service("zoo", external=["192.0.2.11"]),
        dials=to("192.0.2.11"),
        external_networks=(("*", parse_network("203.0.113.0/24")),),
    ),
    Protected.OF_OTHER_NODE: case(
        ROUTED,
        service("zoo", external=["192.0.2.11"]),
        dials=to("192.0.2.11"),
        peers=PEERS,
        protection=Protection.NODES,
    ),
    Reason.NO_FRONTEND: case(ROUTED, WEB, READY, dials=to("10.97.0.1")),
    # Source ranges
    Reason.UNRESTRICTED: case(CONNECTS, WEB, READY),
    Reason.IN_RANGES: case(CONNECTS, RANGED, READY, dials=to(BALANCER), by=A_CLIENT),
    Reason.NODE_IN_RANGES: case(
        CONNECTS,
        service("web", balancer=[BALANCER], ranges=["192.0.2.0/24"], type_=ServiceType.LOAD_BALANCER),
        READY,
        dials=to(BALANCER),
        by=THE_NODE,
    ),
    Reason.NOT_IN_RANGES: case(DROPPED, RANGED, READY, dials=to(BALANCER), by=A_POD),
    Reason.RANGES_UNKNOWN_CLIENT: case(DROPPED, RANGED, READY, dials=to(BALANCER)),
    Reason.RANGES_WITHOUT_ENDPOINTS: case(REJECTED, RANGED, dials=to(BALANCER), by=A_POD, mode="iptables"),
    # Policy
    Reason.INTERNAL_CLUSTER: case(CONNECTS, WEB, READY),
    Reason.INTERNAL_LOCAL: case(CONNECTS, INTERNAL_LOCAL, READY),
    Reason.EXTERNAL_CLUSTER: case(CONNECTS, NODE_PORT_WEB, READY, dials=to(NODE, 30080), by=A_CLIENT),
    Reason.EXTERNAL_LOCAL: case(CONNECTS, LOCAL_WEB, READY, dials=to(NODE, 30080), by=A_CLIENT),
    Reason.EXTERNAL_LOCAL_INSIDE: case(CONNECTS, LOCAL_WEB, READY, dials=to(NODE, 30080), by=A_POD),
    Reason.IPVS_ONE_LIST: case(CONNECTS, LOCAL_WEB, READY, dials=to(NODE, 30080), by=A_POD, mode="ipvs"),
    # Endpoints
    EndpointReason.READY: case(CONNECTS, WEB, READY),
    EndpointReason.READY_HINT_NODE: case(
        CONNECTS, WEB, slice_of("web", endpoint(POD, nodes=[HERE]), endpoint(REMOTE_POD, nodes=["x"]))
    ),
    EndpointReason.READY_HINT_ZONE: case(
        CONNECTS, WEB, slice_of("web", endpoint(POD, zones=["a"])), zone="a"
    ),
    EndpointReason.READY_ON_NODE: case(CONNECTS, INTERNAL_LOCAL, READY),
    EndpointReason.ONLY_TERMINATING: case(CONNECTS, WEB, slice_of("web", draining(REMOTE_POD))),
    EndpointReason.ONLY_TERMINATING_ON_NODE: case(
        CONNECTS, INTERNAL_LOCAL, slice_of("web", draining(POD, HERE))
    ),
    EndpointReason.NOT_READY: case(REJECTED, WEB, slice_of("web", DEAD)),
    EndpointReason.NOT_SERVING: case(REJECTED, WEB, slice_of("web", DEAD._replace(terminating=True))),
    EndpointReason.TERMINATING: case(CONNECTS, WEB, slice_of("web", endpoint(POD), draining(REMOTE_POD))),
    EndpointReason.HINT_OTHER_NODE: case(
        CONNECTS, WEB, slice_of("web", endpoint(POD, nodes=[HERE]), endpoint(REMOTE_POD, nodes=["x"]))
    ),
    EndpointReason.HINT_OTHER_ZONE: case(
        CONNECTS,
        WEB,
        slice_of("web", endpoint(POD, zones=["a"]), endpoint(REMOTE_POD, zones=["b"])),
        zone="a",
    ),
    EndpointReason.NOT_LOCAL: case(CONNECTS, INTERNAL_LOCAL, READY),
    EndpointReason.NODE_UNKNOWN: case(DROPPED, INTERNAL_LOCAL, slice_of("web", endpoint(REMOTE_POD, ""))),
    EndpointReason.POD_OF_HOST_PORT: case(
        CONNECTS, HOST_PORT_POD, dials=to(NODE, 8443), by=A_CLIENT, host_ports=True
    ),
    EndpointReason.NO_WEIGHT: case(CONNECTS, WEIGHTED, slice_of("web", endpoint(POD), endpoint(REMOTE_POD))),
    Reason.PORT_MISSING: case(REJECTED, WEB, slice_with(Protocol.UDP, 80, endpoint(POD))),
    Reason.OTHER_FAMILY: case(REJECTED, WEB, slice_of("web", endpoint("fd01::1"))),
    Reason.ONE_LIST_EXCLUDED: case(CONNECTS, LOCAL_WEB, READY, dials=to(NODE, 30080), by=A_POD, mode="ipvs"),
    Reason.HAIRPIN_LOST: case(CONNECTS, WEB, slice_of("web", endpoint(POD, "")), by=A_POD, mode="ipvs"),
    Reason.NODE_IN_TUNNEL: case(DROPPED, TUNNELED_WEB, READY, dials=FORWARDED, by=THE_NODE, mode="ipvs"),
    Reason.HAS_ADDRESS_ITSELF: case(
        CONNECTS,
        ROUTED_WEB,
        slice_of("web", endpoint(REMOTE_POD), endpoint(POD, HERE)),
        dials=FORWARDED,
        by=A_POD,
        mode="ipvs",
    ),
    Reason.NO_ENDPOINTS: case(REJECTED, WEB),
    Reason.NONE_BY_POLICY: case(DROPPED, INTERNAL_LOCAL, REMOTE),
    Reason.LAST_ENDPOINTS_KEPT: case(REJECTED, service(str(API_SERVER))),
    # Affinity
    Reason.NO_AFFINITY: case(CONNECTS, WEB, READY),
    Reason.AFFINITY_BY_NETNS: case(CONNECTS, service("web", affinity=600), READY, by=THE_NODE),
    Reason.AFFINITY_BY_ADDRESS: case(CONNECTS, service("web", affinity=600), READY, by=A_CLIENT),
    # Algorithm
    Reason.RANDOM: case(CONNECTS, WEB, READY),
    Reason.RANDOM_BY_WEIGHT: case(CONNECTS, HEAVY, READY, mode="nftables"),
    Reason.ALGORITHM: case(CONNECTS, ROUND_ROBIN, READY, mode="nftables"),
    Reason.BALANCING_IGNORED: case(CONNECTS, LEAST_CONNECTIONS, READY, mode="nftables"),
    Reason.SCHEDULER: case(CONNECTS, WEB, READY, mode="ipvs"),
    Reason.RELAY_SELECTS: case(CONNECTS, WEB, READY, mode="userspace"),
    Reason.SINGLE: case(CONNECTS, WEB, REMOTE),
    # Connections
    Reason.RESET_IF_REMOVED: case(CONNECTS, RESETTING, READY),
    Reason.RESET_IF_ADDED: case(CONNECTS, REBALANCED, READY),
    EndpointReason.FULL: case(
        CONNECTS,
        REBALANCED,
        slice_of("web", endpoint(POD), endpoint(REMOTE_POD)),
        full=FULL,
    ),
    # Forwarding
    Reason.DIRECT_ROUTING: case(CONNECTS, ROUTED_WEB, READY, dials=FORWARDED, by=A_CLIENT, mode="ipvs"),
    Reason.TUNNEL: case(CONNECTS, TUNNELED_WEB, READY, dials=FORWARDED, by=A_CLIENT, mode="ipvs"),
    Reason.DIRECT_RETURN: case(
        CONNECTS, DSR_WEB, READY, dials=FORWARDED, by=A_CLIENT, peers=PEERS, dsr_port=6083
    ),
    Reason.FORWARDING_LIMITED: case(
        CONNECTS,
        ROUTED_WEB,
        READY,
        dials=FORWARDED,
        by=A_CLIENT,
        mode="ipvs",
        routes=lambda address: Route(2, None, address),
    ),
    # Masquerade
    Reason.KEEPS_ADDRESSES: case(CONNECTS, ROUTED_WEB, READY, dials=FORWARDED, by=A_CLIENT, mode="ipvs"),
    Reason.POLICY_MASQUERADES: case(CONNECTS, WEB, REMOTE, by=A_CLIENT),
    Reason.MASQUERADE_ALL: case(CONNECTS, WEB, REMOTE, by=A_POD, mode="nftables", masquerade_all=True),
    Reason.HAIRPIN: case(CONNECTS, WEB, slice_of("web", endpoint(POD, HERE)), by=A_POD, mode="nftables"),
    Reason.RELAY_IS_CLIENT: case(CONNECTS, WEB, REMOTE, by=A_CLIENT, mode="userspace"),
    Reason.LOOPBACK_NOT_RELAYED: case(
        REJECTED,
        service("web", port(80, protocol=Protocol.UDP, node_port=30080), type_=ServiceType.NODE_PORT),
        slice_with(Protocol.UDP, 80, endpoint(POD)),
        dials=to("127.0.0.1", 30080, Protocol.UDP),
        by=THE_NODE,
        mode="nftables",
    ),
    Reason.SCTP_NOT_RELAYED: case(
        REJECTED,
        SCTP,
        slice_with(Protocol.SCTP, 80, endpoint(POD)),
        dials=to(protocol=Protocol.SCTP),
        by=A_POD,
        mode="userspace",
    ),
    Reason.POLICY_KEEPS: case(CONNECTS, WEB, REMOTE, by=A_POD, mode="nftables"),
    Reason.SOCKET_IS_REWRITTEN: case(CONNECTS, WEB, REMOTE, by=A_POD),
    Reason.REPLY_PASSES_NODE: case(CONNECTS, WEB, slice_of("web", endpoint(POD, HERE)), by=A_CLIENT),
    Reason.ENDPOINT_IS_NODE: case(CONNECTS, WEB, slice_of("web", endpoint(NODE, HERE)), by=A_CLIENT),
    Reason.NO_PROGRAM_AT_DEVICE: case(CONNECTS, WEB, slice_of("web", endpoint(OTHER_POD, "")), by=A_CLIENT),
    # Addresses
    Reason.SEES_CLIENT: case(CONNECTS, WEB, REMOTE, by=A_POD),
    Reason.SEES_NODE: case(CONNECTS, WEB, REMOTE, by=A_CLIENT),
    Reason.PEER_IS_FRONTEND: case(CONNECTS, WEB, READY),
    # Outcome
    Reason.CONNECTS: case(CONNECTS, WEB, READY),
    Reason.REJECTED_NO_ENDPOINTS: case(REJECTED, WEB),
    Reason.DROPPED_BY_POLICY: case(DROPPED, INTERNAL_LOCAL, REMOTE),
    Reason.DROPPED_BY_RANGES: case(DROPPED, RANGED, READY, dials=to(BALANCER), by=A_POD),
    Reason.DROPPED_IN_TUNNEL: case(DROPPED, TUNNELED_WEB, READY, dials=FORWARDED, by=THE_NODE, mode="ipvs"),
    Reason.REJECTED_UNUSED_PORT: case(REJECTED, WEB, READY, dials=to(port=81), mode="nftables"),
    Reason.REJECTED_UNALLOCATED: case(REJECTED, WEB, READY, dials=to("10.96.9.9"), service_cidrs=[CIDR]),
    Reason.DROPPED_UNALLOCATED: case(
        DROPPED, WEB, READY, dials=ping("10.96.9.9"), mode="nftables", service_cidrs=[CIDR]
    ),
    Reason.REJECTED_OR_DROPPED: case(
        Verdict.REJECTED_OR_DROPPED,
        OWN_EXTERNAL,
        service(
            "zoo",
            port(80, node_port=30080),
            ips=["10.96.0.11"],
            type_=ServiceType.NODE_PORT,
            external_policy=LOCAL,
        ),
        slice_of("zoo", endpoint(REMOTE_POD)),
        dials=to(NODE, 30080),
        by=A_CLIENT,
        mode="iptables",
    ),
    Reason.NODE_PORT_DROPPED: case(
        DROPPED,
        service(
            "web",
            port(80, node_port=30080),
            ips=["fd00::10"],
            type_=ServiceType.NODE_PORT,
            external_policy=LOCAL,
        ),
        slice_of("web", endpoint("fd01::1")),
        dials=to("::1", 30080),
        by=THE_NODE,
        mode="iptables",
    ),
    Reason.NODE_PORT_REJECTED: case(
        REJECTED,
        NODE_PORT_WEB,
        dials=to(NODE, 30080),
        mode="iptables",
        node_port_cidrs=networks(["10.0.0.0/8"]),
    ),
    Reason.REACHES_NODE: case(REACHES_NODE, WEB, READY, dials=to(NODE, 22)),
    Reason.ROUTED: case(ROUTED, WEB, READY, dials=to(OUTSIDE, 443)),
    Reason.EXTERNAL_NOT_REJECTED: case(
        ROUTED, service("web", external=[EXTERNAL]), dials=to(EXTERNAL), by=THE_NODE, mode="iptables"
    ),
    Reason.ECHO_ANSWERED: case(ANSWERED, WEB, READY, dials=ping(CLUSTER_IP)),
    Reason.ECHO_NOT_ANSWERED: case(DROPPED, INTERNAL_LOCAL, REMOTE, dials=ping(CLUSTER_IP)),
    Reason.HEALTH_CHECK_ANSWERED: case(ANSWERED, CHECKED, READY, dials=to(NODE, 32000)),
}

TESTED_ELSEWHERE = {
    "test_from_tables.py": {Reason.LISTED, Reason.NOT_LISTED},
    "test_session.py": {
        *Unserved,
        Reason.NO_PORT,
        Reason.LOST_CLAIM,
        Reason.NO_NODE_OBJECT,
        Reason.INVALID_OBJECT,
        Reason.REJECTED_PART,
        Reason.NO_SERVICE,
    },
    "test_facts.py": {
        Reason.AFFINITY_KNOWN,
        Reason.AFFINITY_UNKNOWN,
        Reason.AGREES,
        Reason.DISAGREES,
        Reason.FORWARD_DROPS,
    },
}


@pytest.mark.parametrize("reason", CASES, ids=lambda reason: reason.word)
def test_a_connection_has_the_reason_and_the_verdict(reason: AnyReason) -> None:
    found = CASES[reason].explained()
    assert reason in reasons(found)
    assert found.verdict is CASES[reason].verdict
    assert found.steps[-1].reason is found.why
    assert found.steps[-1].reason.subject == "outcome"


def test_a_method_that_only_a_user_requests_is_limited() -> None:
    limited = situation(ROUTED_WEB, READY, mode="ipvs", service_forwarding=False)
    steps = {step.reason: step.text for step in explained(limited, FORWARDED, A_CLIENT).steps}
    assert "--ipvs-service-forwarding" in steps[Reason.FORWARDING_LIMITED]


def test_in_mode_userspace_source_ranges_do_not_apply_without_endpoints() -> None:
    """Nothing listens. It was explained as dropped."""
    found = explained(situation(RANGED, mode="userspace"), to(BALANCER), A_POD)
    assert found.verdict is Verdict.REJECTED
    assert Reason.RANGES_WITHOUT_ENDPOINTS in reasons(found)


@pytest.mark.parametrize(
    ("mode", "address"), [("iptables", "10.96.9.9"), ("nftables", "10.97.0.1"), ("ebpf", "10.97.0.1")]
)
def test_addresses_outside_the_service_cidrs_are_routed_and_in_other_modes_all(
    mode: str, address: str
) -> None:
    found = explained(situation(WEB, READY, mode=mode, service_cidrs=[CIDR]), to(address))
    assert found.verdict is ROUTED


def test_mode_ebpf_rejects_unused_ports_only_in_a_service_cidr() -> None:
    known = explained(situation(WEB, READY, service_cidrs=[CIDR]), to(port=81))
    assert (known.verdict, known.why) == (REJECTED, Reason.REJECTED_UNUSED_PORT)
    assert explained(situation(WEB, READY), to(port=81)).verdict is ROUTED


def test_mode_ebpf_routes_what_another_machine_may_have() -> None:
    on_link = DEVICES[0]._replace(networks=networks(["10.96.0.0/12"]))
    of = situation(WEB, READY, service_cidrs=[CIDR], devices=[on_link])
    assert explained(of, to("10.96.9.9")).verdict is ROUTED


def test_mode_ebpf_routes_pings_of_unused_addresses() -> None:
    assert explained(situation(WEB, READY, service_cidrs=[CIDR]), ping("10.96.9.9")).verdict is ROUTED


@pytest.mark.parametrize(
    ("mode", "cidrs", "reason"),
    [
        ("iptables", ["127.0.0.0/8"], Reason.LOOPBACK_EXCLUDED),
        ("nftables", [], Reason.LOOPBACK_EXCLUDED),
        ("iptables", [], Reason.NODE_PORT),
        ("ebpf", ["127.0.0.0/8"], Reason.NODE_PORT),
    ],
)
def test_an_address_of_no_device_accepts_node_ports_by_mode(
    mode: str, cidrs: list[str], reason: Reason
) -> None:
    of = situation(NODE_PORT_WEB, READY, mode=mode, node_port_cidrs=networks(cidrs))
    assert reason in reasons(explained(of, to("127.0.0.2", 30080), THE_NODE))


def test_mode_nftables_relays_tcp_at_loopback_by_the_algorithms_of_a_relay() -> None:
    of = dataclasses.replace(NODE_PORT_WEB, balancing=Balancing(Algorithm.MAGLEV))
    at = situation(of, READY, mode="nftables")
    found = explained(at, to("127.0.0.1", 30080), THE_NODE)
    assert found.path
    assert found.path.via is Via.RELAY
    assert {Reason.RELAY_SELECTS, Reason.BALANCING_IGNORED, Reason.RELAY_IS_CLIENT} <= reasons(found)
    elsewhere = explained(at, to(NODE, 30080), THE_NODE)
    assert Reason.ALGORITHM in reasons(elsewhere)


def test_every_reason_has_a_test() -> None:
    elsewhere = {reason for some in TESTED_ELSEWHERE.values() for reason in some}
    assert not elsewhere & CASES.keys()
    assert elsewhere | CASES.keys() == {reason for some in BY_SUBJECT.values() for reason in some}


def test_names_and_meanings_differ_and_fit_in_a_line() -> None:
    every = [each for reasons in BY_SUBJECT.values() for each in reasons]
    assert len({reason.word for reason in every}) == len(every)
    assert len({reason.meaning for reason in every}) == len(every)
    assert all("\n" not in reason.value and 0 < len(reason.meaning) <= 110 for reason in every)
    assert {reason.subject for reason in EndpointReason} == {"endpoints"}
    assert len(BY_SUBJECT) == 15
    assert len(every) == len({*EndpointReason, *Unserved, *Protected, *Reason})


def test_the_algorithm_has_its_name_and_the_weights_that_the_mode_honors() -> None:
    steps = {
        mode: algorithm_steps(situation(ROUND_ROBIN, READY, mode=mode)) for mode in ("nftables", "iptables")
    }
    (honored,), (default, ignored) = steps["nftables"], steps["iptables"]
    assert honored.text.endswith(": round-robin")
    assert honored.details == (f"{OTHER_POD}:8080: weight 1", f"{REMOTE_POD}:8080: weight 3")
    assert (default.reason, default.details) == (Reason.RANDOM, ())
    assert ignored.text.endswith(": lb-algorithm round-robin, endpoint-weights other than 0")


def test_equal_weights_are_not_shown() -> None:
    weights = Balancing(weights=parse_weights(f"{REMOTE_POD}=2, {OTHER_POD}=2, {POD}=0"))
    three = slice_of("web", endpoint(REMOTE_POD), endpoint(OTHER_POD, HERE), endpoint(POD, HERE))
    of = situation(dataclasses.replace(WEB, balancing=weights), three, mode="nftables")
    assert [(step.reason, step.details) for step in algorithm_steps(of)] == [(Reason.RANDOM, ())]


def algorithm_steps(of: Situation) -> list[Step]:
    return [step for step in explained(of).steps if step.reason.subject == "algorithm"]


def test_the_addresses_that_the_server_sees() -> None:
    """The pod itself by a socket; eth0's address for a client outside; veth7's for a hairpin connection."""
    remote = situation(WEB, REMOTE)
    seen = {
        origin.kind.value: explained(remote, origin=origin).endpoints[0].seen
        for origin in (A_POD, THE_NODE, A_CLIENT)
    }
    node = (parse_address(NODE),)
    assert seen == {"pod": (parse_address(POD),), "node": node, "outside": node}
    itself = situation(WEB, slice_of("web", endpoint(POD, HERE)), mode="nftables")
    assert explained(itself, origin=A_POD).endpoints[0].seen == (parse_address("10.1.0.1"),)


def hash_step(algorithm: Algorithm, origin: Origin, mode: str = "ebpf", **fields: Any) -> Step:
    of = dataclasses.replace(WEB, balancing=Balancing(algorithm, **fields))
    steps = explained(situation(of, READY, mode=mode), origin=origin).steps
    return next(each for each in steps if each.reason is Reason.ALGORITHM)


def test_the_endpoint_of_a_known_client_is_shown_for_source_hash() -> None:
    """The programs' own choice is compared in tests/kernel/packet_path/test_packet_balancing.py."""
    clients = [Origin(ClientClass.OUTSIDE, "client", (parse_address(f"198.51.100.{n}"),)) for n in range(20)]
    lines = {line for each in clients for line in hash_step(Algorithm.SOURCE_HASH, each).details}
    assert lines == {f"this client gets {pod}:8080" for pod in (REMOTE_POD, OTHER_POD)}


@pytest.mark.parametrize("mode", ["ebpf", "nftables"])
@pytest.mark.parametrize("algorithm", [Algorithm.SOURCE_HASH, Algorithm.MAGLEV])
def test_the_endpoint_of_a_known_client_and_port_is_shown_for_hashes(mode: str, algorithm: Algorithm) -> None:
    """That of mode nftables is compared with the kernel's in tests/kernel/test_nftables_balancing.py."""
    client = Origin(ClientClass.OUTSIDE, "client", (parse_address("198.51.100.7"),))
    lines = {
        line
        for port in range(40_000, 40_040)
        for line in hash_step(algorithm, client._replace(port=port), mode).details
    }
    both = {f"this client gets {pod}:8080" for pod in (REMOTE_POD, OTHER_POD)}
    assert len(lines) == (1 if algorithm is Algorithm.SOURCE_HASH else 2)
    assert lines <= both


@pytest.mark.parametrize("mode", ["ebpf", "nftables"])
def test_without_a_port_maglev_asks_for_it(mode: str) -> None:
    assert hash_step(Algorithm.MAGLEV, A_CLIENT, mode).details == (BY_PORT,)


def test_modes_without_these_hashes_show_no_endpoint() -> None:
    client = A_CLIENT._replace(port=40_000)
    assert hash_step(Algorithm.SOURCE_HASH, client, "userspace").details == ()


def test_a_heavy_endpoint_is_shown_for_most_clients() -> None:
    clients = [Origin(ClientClass.OUTSIDE, "client", (parse_address(f"198.51.100.{n}"),)) for n in range(100)]
    weights = parse_weights(f"{REMOTE_POD}=100")
    last = [hash_step(Algorithm.SOURCE_HASH, each, weights=weights).details[-1] for each in clients]
    assert sum(REMOTE_POD in line for line in last) > 90


@pytest.mark.parametrize(
    ("algorithm", "line"), [(Algorithm.SOURCE_HASH, BY_NETNS), (Algorithm.MAGLEV, BY_RANDOM)]
)
def test_what_identifies_the_client_of_a_socket_is_shown_for_hashes(algorithm: Algorithm, line: str) -> None:
    assert hash_step(algorithm, THE_NODE).details == (line,)


def test_the_address_of_a_pod_identifies_its_sockets_if_it_is_the_only_one() -> None:
    of = dataclasses.replace(service("web", affinity=600), balancing=Balancing(Algorithm.SOURCE_HASH))
    single = Namespace(7, Link.NODE, addresses=frozenset({parse_address(POD)}), pod="uid", up=("eth0",))
    several = single._replace(addresses=single.addresses | {parse_address("10.1.0.99")})
    for known, reason in (single, Reason.AFFINITY_BY_ADDRESS), (several, Reason.AFFINITY_BY_NETNS):
        explanation = explained(situation(of, READY, namespaces=(known,)), origin=A_POD._replace(cookie=7))
        assert Reason.CONNECT_HOOK in reasons(explanation)
        assert reason in reasons(explanation)
        (step,) = (each for each in explanation.steps if each.reason is Reason.ALGORITHM)
        (line,) = step.details
        assert (line == BY_NETNS) is (known is several)
        assert line.startswith("this client gets ") is (known is single)


def test_only_endpoints_with_a_tunnel_reply_directly_and_only_to_clients_outside() -> None:
    explanation = explained(WITH_TUNNEL, FORWARDED, A_CLIENT)
    (step,) = [each for each in explanation.steps if each.reason is Reason.DIRECT_RETURN]
    assert step.details == (f"{REMOTE_POD}:8080: by 192.0.2.11",)
    tunneled, here = explanation.endpoints[::-1]
    assert (tunneled.masqueraded, tunneled.why_masquerade) == (False, Reason.KEEPS_ADDRESSES)
    assert tunneled.seen == (parse_address(OUTSIDE),)
    assert here.why_masquerade is Reason.REPLY_PASSES_NODE
    for origin in A_POD, THE_NODE:
        assert Reason.DIRECT_RETURN not in reasons(explained(WITH_TUNNEL, FORWARDED, origin))


def test_direct_server_return_without_a_port_is_ignored() -> None:
    explanation = explained(situation(DSR_WEB, READY), FORWARDED, A_CLIENT)
    (step,) = [each for each in explanation.steps if each.reason is Reason.BALANCING_IGNORED]
    assert step.text.endswith(": ebpf-forwarding dsr")


@pytest.mark.parametrize("mode", ["ebpf", "nftables", "iptables", "ipvs", "userspace"])
def test_a_load_balancer_address_of_loopback_is_not_that_of_a_pod(mode: str) -> None:
    at_loopback = service("web", balancer=["127.0.0.1"], type_=ServiceType.LOAD_BALANCER)
    found = explained(situation(at_loopback, READY, mode=mode), to("127.0.0.1"), A_POD)
    assert found.verdict is ROUTED
    assert Reason.OTHER_LOOPBACK in reasons(found)


@pytest.mark.parametrize(("address", "verdict"), [(EXTERNAL, ROUTED), (CLUSTER_IP, ANSWERED)])
def test_an_echo_request_to_an_address_that_a_machine_may_have_is_routed(
    address: str, verdict: Verdict
) -> None:
    """A ClusterIP is no machine's."""
    web = service("web", external=[EXTERNAL])
    on_link = DEVICES[0]._replace(networks=networks([f"{address}/32"]))
    assert explained(situation(web, READY), ping(address)).verdict is ANSWERED
    assert explained(situation(web, READY, devices=(on_link,)), ping(address)).verdict is verdict
