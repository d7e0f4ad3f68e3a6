"""The ipsets: those of kube-proxy with its names (pkg/proxy/ipvs/ipset.go and proxier.go), and four more.
Pure.

The names for IPv6 have "6-" after "KUBE-".
"""

import enum
from typing import NamedTuple

from ebpfproxy.linux.ipset import IpSet
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

# The agent's own:
NODE_PORT_IP = "KUBE-NODE-PORT-IP"
NO_LOCAL = "KUBE-NO-LOCAL"
NO_LOCAL_BUT_PODS = "KUBE-NO-LOCAL-BUT-PODS"
UNTRANSLATED = "KUBE-IPVS-UNTRANSLATED"

OWN_SETS = frozenset({NODE_PORT_IP, NO_LOCAL, NO_LOCAL_BUT_PODS, UNTRANSLATED})

BITMAP = "bitmap:port"
_IP_PORT, _IP = "hash:ip,port", "hash:ip"


class Order(enum.Enum):
    """When members are put. They are dropped in the reverse order.

    LAST are the members that exempt a client's address from masquerading, so that only endpoints of this node
    can reply. They are put after a virtual server lost its other endpoints, and dropped before it gets any.
    """

    FIRST = enum.auto()
    SECOND = enum.auto()  # before virtual servers: rules reject all but members that are FIRST
    LAST = enum.auto()


class _Declared(NamedTuple):
    """The type of a set. `comment` is the comment of the rules that match it."""

    type: str
    comment: str
    order: Order = Order.FIRST


SETS: dict[str, _Declared] = {
    LOOP_BACK: _Declared(
        "hash:ip,port,ip", "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose"
    ),
    CLUSTER_IP: _Declared(_IP_PORT, "Kubernetes service cluster ip + port for masquerade purpose"),
    EXTERNAL_IP: _Declared(
        _IP_PORT, "Kubernetes service external ip + port for masquerade and filter purpose"
    ),
    EXTERNAL_IP_LOCAL: _Declared(
        _IP_PORT, "Kubernetes service external ip + port with externalTrafficPolicy=local"
    ),
    LOAD_BALANCER: _Declared(_IP_PORT, "Kubernetes service lb portal"),
    LOAD_BALANCER_LOCAL: _Declared(
        _IP_PORT,
        "Kubernetes service load balancer ip + port with externalTrafficPolicy=local",
        Order.LAST,
    ),
    LOAD_BALANCER_FW: _Declared(
        _IP_PORT,
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
    NODE_PORT[Protocol.SCTP]: _Declared(_IP_PORT, "Kubernetes nodeport SCTP port for masquerade purpose"),
    NODE_PORT_LOCAL[Protocol.SCTP]: _Declared(
        _IP_PORT, "Kubernetes nodeport SCTP port with externalTrafficPolicy=local", Order.LAST
    ),
    HEALTH_CHECK_NODE_PORT: _Declared(BITMAP, "Kubernetes health check node port"),
    IPVS_IPS: _Declared(_IP, "Kubernetes ipvs service ips"),
    NODE_PORT_IP: _Declared(_IP, "addresses of this node that NodePorts answer on"),
    NO_LOCAL: _Declared(_IP_PORT, "no endpoint on this node"),
    NO_LOCAL_BUT_PODS: _Declared(_IP_PORT, "no endpoint on this node, pods of this cluster have all"),
    UNTRANSLATED: _Declared(_IP_PORT, "direct routing or tunnel, endpoints reply to clients"),
}
"""The declaration of each set, by its name for IPv4."""

MAX_ELEMENTS = 1 << 20
"""The capacity of the sets that the agent creates. The kernel allocates memory for actual members only.
kube-proxy's sets have 65 536.
"""

_MAX_NAME = 31
"""IPSET_MAXNAMELEN without the zero byte."""

_PREFIX = {Family.IPV4: "KUBE-", Family.IPV6: "KUBE-6-"}


def set_name(base: str, family: Family) -> str:
    """Return the name of a set for a family. Like kube-proxy, truncate it to the kernel's maximum length.

    >>> set_name("KUBE-LOAD-BALANCER-SOURCE-CIDR", Family.IPV6)
    'KUBE-6-LOAD-BALANCER-SOURCE-CID'
    """
    return (_PREFIX[family] + base.removeprefix("KUBE-"))[:_MAX_NAME]


def ip_set(base: str, family: Family) -> IpSet:
    """Return the set with the parameters that the agent creates it with."""
    kind = SETS[base].type
    bitmap = kind == BITMAP
    return IpSet(set_name(base, family), kind, None if bitmap else family, 0 if bitmap else MAX_ELEMENTS)


NAMES: dict[str, tuple[str, Family]] = {
    set_name(base, family): (base, family) for base in SETS for family in Family
}
"""The base name and the family of each set, by its name."""

WITH_PORT = tuple(base for base, declared in SETS.items() if declared.type == _IP_PORT)
"""The sets of addresses with ports."""


def member_text(address: Address, port: int, protocol: Protocol) -> str:
    """Return the text of a member of a set of addresses with ports.

    >>> from ebpfproxy.model.address import parse_address
    >>> member_text(parse_address("10.96.0.1"), 53, Protocol.UDP)
    '10.96.0.1,udp:53'
    """
    return f"{format_address(address)},{protocol.name.lower()}:{port}"


ANYWHERE = {family: f"{format_address(unspecified(family))}," for family in Family}
"""How the text of a general member begins: it applies to each address that NodePorts answer on."""
