"""The ipsets: those of kube-proxy with its names (pkg/proxy/ipvs/ipset.go and proxier.go), and four more.

The names for IPv6 have "6-" after "KUBE-". Sets also decide which virtual servers belong to Services (the
agent's or kube-proxy's), and which to another program (`ownership`). A virtual server has no field for its
owner. But either its address and port is in one of the mode's sets, from before its creation until after
its removal, or its address is on kube-ipvs0. The same is true of kube-proxy.
"""

import contextlib
import enum
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.backends.ipvs.entries import Entry, Key, Member, Set
from ebpfproxy.errors import AlreadyExists, KernelError, Rejected, Unsupported
from ebpfproxy.linux import ipset
from ebpfproxy.linux.ipset import IpSet, Stored
from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    Protocol,
    contains,
    format_address,
    parse_address,
    unspecified,
)
from ebpfproxy.plan.service_plan import Frontend

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


Rejections = dict[Key, KernelError]


def create_all(family: Family) -> None:
    """Create the sets that do not exist. Raises KernelError."""
    for failure in ipset.change(ipset.creation(ip_set(base, family)) for base in SETS).values():
        raise failure


def exist() -> bool:
    """Return whether any of the sets exists. Raises Rejected."""
    with contextlib.suppress(Unsupported):
        return not NAMES.keys().isdisjoint(ipset.elements())
    return False


class IpSets:
    """The ipsets in the calling thread's network namespace. Sets with other names are ignored."""

    def __init__(self) -> None:
        self._known: dict[str, Stored] = {}  # without members

    def read(self, families: Iterable[Family]) -> dict[Key, Entry]:
        """Return the entries of the sets and their members. A set of another type or family has the entry
        False and no members.

        Raises KernelError.
        """
        served = tuple(families)
        self._known = {}
        found: dict[Key, Entry] = {}
        names = [name for name in ipset.elements() if name in NAMES and NAMES[name][1] in served]
        for name, stored in ipset.read(names).items():
            base, family = NAMES[name]
            self._known[name] = stored._replace(members=frozenset())
            matches = _accept_same_members(stored, ip_set(base, family))
            found[Set(family, name)] = stored.type if matches else False
            found.update((Member(family, name, text), True) for text in stored.members if matches)
        return found

    def create(self, keys: Iterable[Set]) -> Rejections:
        """Create the sets that do not exist. A set of another type is rejected, since rules would still refer
        to the old one.
        """
        keys = list(keys)
        made = [key for key in keys if key.name not in self._known]
        failed = ipset.change(ipset.creation(ip_set(*NAMES[key.name])) for key in made)
        rejected: Rejections = {made[position]: failure for position, failure in failed.items()}
        present = ipset.read(made[at].name for at, why in failed.items() if isinstance(why, AlreadyExists))
        for key in keys:
            desired = ip_set(*NAMES[key.name])
            if key.name in present:  # another program has created it since the last read
                self._known[key.name] = present[key.name]
                del rejected[key]
            elif key not in rejected:
                self._known.setdefault(key.name, Stored(desired.type, desired.family, frozenset()))
            if failure := self._mismatch(key.name):
                rejected[key] = failure
        return rejected

    def change(self, puts: Iterable[Member], drops: Iterable[Member]) -> Rejections:
        """Add and remove members of several sets at once."""
        rejected: Rejections = {}
        changes = [("del", key) for key in drops if key.set in self._known] + [("add", key) for key in puts]
        for _, key in changes:
            if failure := self._mismatch(key.set):
                rejected[key] = failure
        changes = [(command, key) for command, key in changes if key not in rejected]
        failed = ipset.change(f"{command} {key.set} {key.text}" for command, key in changes)
        return rejected | {changes[position][1]: failure for position, failure in failed.items()}

    def destroy(self, keys: Iterable[Set]) -> Rejections:
        keys = list(keys)
        failed = ipset.change(f"destroy {key.name}" for key in keys)
        for position, key in enumerate(keys):
            if position not in failed:
                self._known.pop(key.name, None)
        return {keys[position]: failure for position, failure in failed.items()}

    def generation(self) -> Mapping[str, int]:
        """Return the number of members of each set."""
        return {name: number for name, number in ipset.elements().items() if name in NAMES}

    def _mismatch(self, name: str) -> Rejected | None:
        """Return why no member of a set can be changed, None if its type is right or unknown."""
        existing, desired = self._known.get(name), ip_set(*NAMES[name])
        if existing is None or _accept_same_members(existing, desired):
            return None
        return Rejected(
            f"cannot create ipset {name}: it exists as {_described(existing)}, not {_described(desired)}",
            f"remove the rules that iptables-save shows with it, then: ipset destroy {name}",
        )


def _accept_same_members(one: Stored, other: IpSet) -> bool:
    """Return whether both sets accept the same members."""
    return (one.type, one.family) == (other.type, other.family)


def _described(one: Stored | IpSet) -> str:
    return f"{one.type} of {one.family.value}" if one.family else one.type


class Ownership(NamedTuple):
    """The data that identify the virtual servers of Services.

    - `frontends`: members of sets of addresses with ports.
    - `node_ports`: protocol and port of members of the sets without addresses.
    - `node_addresses`: the addresses that these answer on.
    - `on_device`: the addresses on kube-ipvs0.
    - `excluded`: networks in which only an exact match counts (--ipvs-exclude-cidrs).
    """

    frontends: frozenset[str]
    node_ports: frozenset[tuple[str, str]]
    node_addresses: frozenset[Address]
    on_device: frozenset[Address]
    excluded: tuple[Network, ...]

    def is_own(self, frontend: Frontend) -> bool:
        """Return whether a virtual server belongs to a Service. In excluded networks, its port must also
        match.
        """
        address, port, protocol = frontend
        if member_text(address, port, protocol) in self.frontends:
            return True
        if address in self.node_addresses and (protocol.name, str(port)) in self.node_ports:
            return True
        return address in self.on_device and not any(contains(net, address) for net in self.excluded)


def ownership(
    found: Iterable[Key],
    on_device: frozenset[Address],
    local: Collection[Network],
    excluded: tuple[Network, ...],
) -> Ownership:
    """Return the ownership data. `found` has sets and members.

    `local`: the local networks of the node. They are used for kube-proxy's virtual servers, since it has no
    set of the addresses that NodePorts answer on.
    """
    frontends: set[str] = set()
    node_ports: set[tuple[str, str]] = set()
    node_addresses: set[Address] = set()
    has_node_port_ips = False
    for key in found:
        base = (
            NAMES[key.set if isinstance(key, Member) else key.name][0]
            if isinstance(key, Member | Set)
            else ""
        )
        if isinstance(key, Set):
            has_node_port_ips = has_node_port_ips or base == NODE_PORT_IP
        elif isinstance(key, Member):
            if base in WITH_PORT:
                frontends.add(key.text)
            elif base == NODE_PORT_IP:
                node_addresses.add(parse_address(key.text))
            elif base in NODE_PORT.values():
                node_ports.add((_PROTOCOL_OF[base], key.text))
    if not has_node_port_ips:
        addresses = (net.address for net in local if net.length == _SINGLE)
        node_addresses |= {each for each in addresses if not any(contains(net, each) for net in excluded)}
    return Ownership(
        frozenset(frontends), frozenset(node_ports), frozenset(node_addresses), on_device, excluded
    )


_SINGLE = 128
_PROTOCOL_OF = {base: protocol.name for protocol, base in NODE_PORT.items()}
