"""The ipsets: kube-proxy's by its names (pkg/proxy/ipvs/ipset.go and proxier.go), and three of our own.

Those of IPv6 have "6-" behind "KUBE-". Pure.
"""

import enum
from typing import NamedTuple

from ebpfproxy.linux.ipset.messages import IpSet
from ebpfproxy.model.address import Address, Family, Protocol, format_address, unspecified

LOOP_BACK = "KUBE-LOOP-BACK"
CLUSTER_IP = "KUBE-CLUSTER-IP"
EXTERNAL_IP = "KUBE-EXTERNAL-IP"
EXTERNAL_IP_LOCAL = "KUBE-EXTERNAL-IP-LOCAL"
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
LOAD_BALANCER_LOCAL = "KUBE-LOAD-BALANCER-LOCAL"
LOAD_BALANCER_FW = "KUBE-LOAD-BALANCER-FW"
LOAD_BALANCER_SOURCE_CIDR = "KUBE-LOAD-BALANCER-SOURCE-CIDR"
LOAD_BALANCER_SOURCE_IP = "KUBE-LOAD-BALANCER-SOURCE-IP"
HEALTH_CHECK_NODE_PORT = "KUBE-HEALTH-CHECK-NODE-PORT"
IPVS_IPS = "KUBE-IPVS-IPS"
NODE_PORT = {
    Protocol.TCP: "KUBE-NODE-PORT-TCP",
    Protocol.UDP: "KUBE-NODE-PORT-UDP",
    Protocol.SCTP: "KUBE-NODE-PORT-SCTP-HASH",
}
NODE_PORT_LOCAL = {
    Protocol.TCP: "KUBE-NODE-PORT-LOCAL-TCP",
    Protocol.UDP: "KUBE-NODE-PORT-LOCAL-UDP",
    Protocol.SCTP: "KUBE-NODE-PORT-LOCAL-SCTP-HASH",
}

# Our own:
NODE_PORT_IP = "KUBE-NODE-PORT-IP"
NO_LOCAL = "KUBE-NO-LOCAL"
NO_LOCAL_BUT_PODS = "KUBE-NO-LOCAL-BUT-PODS"

BITMAP = "bitmap:port"
_PLACES, _ADDRESSES = "hash:ip,port", "hash:ip"


class Order(enum.Enum):
    """When members are put; they are dropped the other way round.

    LAST are those that spare a client's address the masquerade, by which only endpoints of this node can
    answer: put when a virtual server has no others any more, dropped before it gets some.
    """

    FIRST = enum.auto()
    SECOND = enum.auto()  # yet before virtual servers: what rejects all but members that are FIRST
    LAST = enum.auto()


class _Declared(NamedTuple):
    """`comment` is that of rules which match it."""

    type: str
    comment: str
    order: Order = Order.FIRST


SETS: dict[str, _Declared] = {
    LOOP_BACK: _Declared(
        "hash:ip,port,ip", "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose"
    ),
    CLUSTER_IP: _Declared(_PLACES, "Kubernetes service cluster ip + port for masquerade purpose"),
    EXTERNAL_IP: _Declared(
        _PLACES, "Kubernetes service external ip + port for masquerade and filter purpose"
    ),
    EXTERNAL_IP_LOCAL: _Declared(
        _PLACES, "Kubernetes service external ip + port with externalTrafficPolicy=local"
    ),
    LOAD_BALANCER: _Declared(_PLACES, "Kubernetes service lb portal"),
    LOAD_BALANCER_LOCAL: _Declared(
        _PLACES, "Kubernetes service load balancer ip + port with externalTrafficPolicy=local", Order.LAST
    ),
    LOAD_BALANCER_FW: _Declared(
        _PLACES,
        "Kubernetes service load balancer ip + port for load balancer with sourceRange",
        Order.SECOND,
    ),
    LOAD_BALANCER_SOURCE_CIDR: _Declared(
        "hash:ip,port,net",
        "Kubernetes service load balancer ip + port + source cidr for packet filter purpose",
    ),
    LOAD_BALANCER_SOURCE_IP: _Declared(
        "hash:ip,port,ip", "Kubernetes service load balancer ip + port + source IP for packet filter purpose"
    ),
    NODE_PORT[Protocol.TCP]: _Declared(BITMAP, "Kubernetes nodeport TCP port for masquerade purpose"),
    NODE_PORT_LOCAL[Protocol.TCP]: _Declared(
        BITMAP, "Kubernetes nodeport TCP port with externalTrafficPolicy=local", Order.LAST
    ),
    NODE_PORT[Protocol.UDP]: _Declared(BITMAP, "Kubernetes nodeport UDP port for masquerade purpose"),
    NODE_PORT_LOCAL[Protocol.UDP]: _Declared(
        BITMAP, "Kubernetes nodeport UDP port with externalTrafficPolicy=local", Order.LAST
    ),
    NODE_PORT[Protocol.SCTP]: _Declared(_PLACES, "Kubernetes nodeport SCTP port for masquerade purpose"),
    NODE_PORT_LOCAL[Protocol.SCTP]: _Declared(
        _PLACES, "Kubernetes nodeport SCTP port with externalTrafficPolicy=local", Order.LAST
    ),
    HEALTH_CHECK_NODE_PORT: _Declared(BITMAP, "Kubernetes health check node port"),
    IPVS_IPS: _Declared(_ADDRESSES, "Kubernetes ipvs service ips"),
    NODE_PORT_IP: _Declared(_ADDRESSES, "addresses of this node that NodePorts answer on"),
    NO_LOCAL: _Declared(_PLACES, "no endpoint on this node"),
    NO_LOCAL_BUT_PODS: _Declared(_PLACES, "no endpoint on this node, pods of this cluster have all"),
}
"""By the names for IPv4: what each is."""

MAX_ELEMENTS = 1 << 20
"""Room in each that we make; the kernel takes memory for what is in it. kube-proxy's have 65 536."""

_LONGEST = 31
"""IPSET_MAXNAMELEN without the zero byte."""

_PREFIX = {Family.IPV4: "KUBE-", Family.IPV6: "KUBE-6-"}


def set_name(base: str, of: Family) -> str:
    """Cut where it is longer than the kernel allows, as kube-proxy does it.

    >>> set_name("KUBE-LOAD-BALANCER-SOURCE-CIDR", Family.IPV6)
    'KUBE-6-LOAD-BALANCER-SOURCE-CID'
    """
    return (_PREFIX[of] + base.removeprefix("KUBE-"))[:_LONGEST]


def ip_set(base: str, of: Family) -> IpSet:
    """As we make it."""
    kind = SETS[base].type
    bitmap = kind == BITMAP
    return IpSet(set_name(base, of), kind, None if bitmap else of, 0 if bitmap else MAX_ELEMENTS)


NAMES: dict[str, tuple[str, Family]] = {set_name(base, of): (base, of) for base in SETS for of in Family}
"""By the name of each set: which it is, and of which family."""

BY_PLACE = tuple(base for base, declared in SETS.items() if declared.type == _PLACES)
"""The sets of addresses with ports."""


def place(address: Address, port: int, protocol: Protocol) -> str:
    """A member of a set of addresses with ports.

    >>> from ebpfproxy.model.address import parse_address
    >>> place(parse_address("10.96.0.1"), 53, Protocol.UDP)
    '10.96.0.1,udp:53'
    """
    return f"{format_address(address)},{protocol.name.lower()}:{port}"


ANYWHERE = {of: f"{format_address(unspecified(of))}," for of in Family}
"""How a member begins that stands for one with each address that NodePorts answer on."""
