"""The settings and entries of the IPVS backend, and the chains that belong to it. Pure.

Besides the chains and rules of `iptables.entries`, there are these kinds of entries:

- `Server`: a virtual server with its real servers, by frontend. Both come from one plan, so they are one
  entry. A real server of weight 0 is not part of it: it is draining.
- `Local`: an address of Services that the node treats as local. It is on kube-ipvs0 and in the set
  KUBE-IPVS-IPS, unless another device has it.
- `Set`: an ipset of the node, with or without members. The node renders all of them, so they are created
  before their members and before the rules that refer to them.
- `Member`: one member of an ipset, as text.
- `PodAddress`, `Tunnel`: an address of Services, and a tunnel device, in the network namespace of an endpoint
  on this node that gets untranslated packets (`forwarding`). They belong to the namespace, and exist only
  while it does.
- `ReturnPath`: the sysctls with which this node forwards what such endpoints reply.

**NodePorts** answer on many addresses, but no plan has both the NodePort and these addresses. So the plan of
a Service renders the `Server` with the unspecified address, and each `Member` in the same way
(`sets.ANYWHERE`). The node renders the addresses as members of KUBE-NODE-PORT-IP. The kernel has all
combinations of both, which `node_port_expansion` computes and reverts. So each entry depends on one plan
alone, and a new address of the node or a new NodePort is one entry.

Keys of different kinds are never equal, although all are tuples: an address is bytes, no table has the name
of a set, and the second field of a `Server` is itself a tuple. The third field of a `Tunnel` makes it unequal
to a `Local`.
"""

import dataclasses
from typing import NamedTuple

from ebpfproxy.backends.iptables import chains
from ebpfproxy.backends.iptables.cleanup import COMMON_CHAINS
from ebpfproxy.backends.iptables.entries import (
    FILTER,
    MANGLE,
    NAT,
    Chain,
    Layout,
    Rule,
    RulePosition,
    SharedChain,
)
from ebpfproxy.linux.ipvs.messages import Flag, RealServer
from ebpfproxy.model.address import Address, Family, Network, format_address
from ebpfproxy.model.balancing import Forwarding
from ebpfproxy.plan.service_plan import Frontend

DEFAULT_SCHEDULER = "rr"


@dataclasses.dataclass(frozen=True, slots=True)
class IpvsSettings:
    """Settings of the IPVS backend.

    - `scheduler`: a scheduler that the kernel has (rr, wrr, lc, wlc, lblc, lblcr, sh, dh, sed, nq, mh, …),
      for Services that request no algorithm.
    - `forwarding`: for Services that request none.
    - `exclude_cidrs`: virtual servers in these networks belong to another program, unless a Service has the
      same frontend.
    - `masquerade_all`: also masquerade connections of pods to ClusterIPs.
    - `masquerade_bit`: the bit of the packet mark that requests masquerading, 0 to 31.
    - `strict_arp`: the node answers ARP for an address only on the device that has it, so not for addresses
      of Services.
    - Timeouts of IPVS in seconds, for TCP connections, closed TCP connections and UDP flows. 0 leaves one
      unchanged.
    """

    scheduler: str = DEFAULT_SCHEDULER
    forwarding: Forwarding = Forwarding.NAT
    exclude_cidrs: tuple[Network, ...] = ()
    masquerade_all: bool = False
    masquerade_bit: int = 14
    strict_arp: bool = False
    tcp_timeout: int = 0
    tcp_fin_timeout: int = 0
    udp_timeout: int = 0

    @property
    def masquerade_mark(self) -> int:
        return 1 << self.masquerade_bit


class Server(NamedTuple):
    family: Family
    frontend: Frontend

    def __str__(self) -> str:
        return f"virtual server {self.frontend}"


class ServerEntry(NamedTuple):
    """- `persistence_s`: the session affinity timeout of a client in seconds, 0 for none.
    - `prefix`: the prefix length that identifies a client, None for the default.
    - `reals`: the real servers, sorted.
    """

    scheduler: str
    flags: Flag
    persistence_s: int
    reals: tuple[RealServer, ...]
    prefix: int | None = None


class Local(NamedTuple):
    family: Family
    address: Address

    def __str__(self) -> str:
        return f"address {format_address(self.address)}"


class Set(NamedTuple):
    family: Family
    name: str

    def __str__(self) -> str:
        return f"ipset {self.name}"


class Member(NamedTuple):
    """`text` is in the format of ``ipset list``."""

    family: Family
    set: str
    text: str

    def __str__(self) -> str:
        return f"{self.text} in ipset {self.set}"


class PodAddress(NamedTuple):
    """`endpoint`: an address of the network namespace. `address`: that of Services."""

    family: Family
    endpoint: Address
    address: Address

    def __str__(self) -> str:
        return f"address {format_address(self.address)} at endpoint {format_address(self.endpoint)}"


class Tunnel(NamedTuple):
    family: Family
    endpoint: Address
    kind: str = "tunnel"

    def __str__(self) -> str:
        return f"tunnel device at endpoint {format_address(self.endpoint)}"


class ReturnPath(NamedTuple):
    family: Family

    def __str__(self) -> str:
        return "sysctls accept_local and rp_filter"


EndpointKey = PodAddress | Tunnel
"""The keys of what is in the network namespaces of endpoints."""

Key = Server | Local | Set | Member | EndpointKey | ReturnPath | Chain | SharedChain | Rule
Entry = ServerEntry | str | bool | tuple[str, ...] | RulePosition
"""The type for a Set; True for a Local, Member, PodAddress, Tunnel and ReturnPath. False for an object that
exists in a wrong form.
"""


OWN_CHAINS = frozenset(
    {
        (NAT, chains.LOAD_BALANCER),
        (NAT, chains.NODE_PORT),
        (NAT, chains.IPVS_POSTROUTING),
        (FILTER, chains.NODE_PORT),
        (FILTER, chains.SOURCE_RANGES_FIREWALL),
        (FILTER, chains.IPVS_FILTER),
        (FILTER, chains.IPVS_OUT_FILTER),  # kube-proxy's
        (MANGLE, chains.IPVS_OUT_FILTER),
    }
)
"""Table and name of the chains that no other mode has."""

LAYOUT = Layout(
    shared=frozenset(),
    exclusive=OWN_CHAINS | COMMON_CHAINS,
    jump_targets={
        NAT: (chains.SERVICES, chains.POSTROUTING, chains.IPVS_POSTROUTING),
        FILTER: (
            chains.FORWARD,
            chains.NODE_PORT,
            chains.PROXY_FIREWALL,
            chains.IPVS_FILTER,
            chains.IPVS_OUT_FILTER,
        ),
        MANGLE: (chains.IPVS_OUT_FILTER,),
    },
)
"""Jumps are prepended as in kube-proxy, so the last one of a built-in chain ends up first."""
