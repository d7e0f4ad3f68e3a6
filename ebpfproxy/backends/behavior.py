"""Where the modes differ in what clients see. The only table: `explain`, docs/dataplanes/README.md and the
tests read it. All other behavior is the same in all modes.

"As with kube-proxy" means that kube-proxy's mode of the same name does the same.
"""

import enum
from typing import NamedTuple

from ebpfproxy.model.address import Family


class NodePortInstead(enum.Enum):
    """When the NodePort of the same number answers at an external address of the node without endpoints.

    For modes nftables and iptables as with kube-proxy: the NodePort's rule is another one, which a packet
    reaches if no rule of the external address has translated it.
    """

    NEVER = "never"
    IF_REJECTED = "if it has endpoints, and no policy and no source range excludes the client"
    IF_UNTRANSLATED = "if it has endpoints"
    IF_NOTHING_LISTENS = "if no policy excludes the endpoints of the external address"


class Unused(enum.Enum):
    """What happens to connections to a port of a ClusterIP that its Service does not have, and to addresses
    of a ServiceCIDR that no Service has, unless the node has the addresses (`has_addresses`).
    """

    ROUTED = "forwarded by routes"
    PORTS_REJECTED = "ports rejected, addresses dropped"
    """As in kube-proxy's mode nftables (KEP-3866)."""
    REJECTED = "rejected"
    """Only in a ServiceCIDR that the agent knows, and that is not in a network of the node or its devices."""


class Behavior(NamedTuple):
    """What clients of one mode see."""

    by_packet: bool
    """Packets are rejected or dropped by netfilter, not system calls by hooks. On the node itself, REJECT and
    DROP return EPERM to a sender of datagrams (nf_hook_slow). A TCP client gets an ICMP error, which
    connect() ignores while it holds the socket lock (tcp_v4_err): then the next SYN is rejected, a second
    later. An unconnected datagram socket gets no error."""

    by_relay: bool
    """Connections end at processes of the agent, which end with it, and which connect to the endpoints. The
    kernel rejects packets to ports without a listener, which an unconnected datagram socket does not notice.
    A NodePort is reachable at the addresses of the node's devices, which include only one of 127.0.0.0/8."""

    has_addresses: bool
    """The node has the addresses of Services: it answers pings of them, and rejects their unused ports. For
    IPVS they are on kube-ipvs0, as with kube-proxy; for relays there are local routes (decision 0068)."""

    masquerades_here: bool
    """With policy Cluster, external clients, and pods that connect to another address than the ClusterIP, are
    masqueraded even if the endpoint is on this node (KUBE-EXT-*, KUBE-MARK-MASQ), as with kube-proxy."""

    loopback: frozenset[Family]
    """The families in which the node reaches NodePorts at loopback addresses. route_localnet, which mode
    iptables needs, exists only for IPv4."""

    relays_loopback: bool
    """A relay serves NodePorts at loopback, at 127.0.0.1 and ::1 and for TCP only. Other protocols are
    rejected, as in kube-proxy's nftables mode (KEP-6032)."""

    unused_cluster_ips: Unused

    rejects_external_of_node: bool
    """The node's own packets to an external or load balancer IP without endpoints are rejected. In mode
    iptables, INPUT and FORWARD jump to the chain KUBE-EXTERNAL-SERVICES, OUTPUT does not: they are routed to
    the host that has the address."""

    rejects_node_ports_everywhere: bool
    """Without endpoints, a NodePort is rejected or dropped also at addresses of the node that do not accept
    NodePorts, as with kube-proxy: the rule matches all addresses."""

    ranges_need_endpoints: bool
    """Source ranges do not apply to a Service without any endpoints: all clients are rejected. In mode
    iptables as with kube-proxy; nothing listens in mode userspace."""

    node_port_instead: NodePortInstead

    flows_end_later: bool
    """UDP flows are ended a moment after the rules are in force, because the sync does not wait for it."""

    leaves_terminating: bool
    """A UDP client of a terminating endpoint switches to a ready one. Netfilter's modes only end flows to
    endpoints that no longer serve, as kube-proxy does (pkg/proxy/conntrack/cleanup.go), and a terminating
    endpoint may still serve."""

    at_output: bool
    """IPVS handles host-originated packets at LOCAL_OUT (ip_vs_ops[]). So a NodePort without endpoints gives
    EPERM like other addresses."""

    one_list: bool
    """With externalTrafficPolicy Local and endpoints on this node, pods and the node also get only these, as
    with kube-proxy: a virtual server has one list of real servers for all clients."""

    ends_with_service: bool
    """Open connections end when the Service is deleted, because they belong to its virtual server; also with
    kube-proxy."""

    takes_answers: bool
    """A UDP packet to a NodePort goes to the Service, even if it is a reply to a request of the node from
    that port. IPVS handles every packet without a known connection."""

    affinity_by_address: bool
    """Session affinity is separate for each address of a Service, because IPVS has virtual servers, not
    Services. The endpoints are equal only if all addresses had the same clients in the same order."""

    answers_pings: bool
    """Service addresses answer pings: those that the node has, and in mode ebpf those where the programs
    forward or reject the client's packets. In netfilter's modes, no rule of kube-proxy translates ICMP."""


_NFTABLES = Behavior(
    by_packet=True,
    by_relay=False,
    has_addresses=False,
    masquerades_here=True,
    loopback=frozenset(Family),
    relays_loopback=True,
    unused_cluster_ips=Unused.PORTS_REJECTED,
    rejects_external_of_node=True,
    rejects_node_ports_everywhere=False,
    ranges_need_endpoints=False,
    node_port_instead=NodePortInstead.IF_REJECTED,
    flows_end_later=True,
    leaves_terminating=False,
    at_output=False,
    one_list=False,
    ends_with_service=False,
    takes_answers=False,
    affinity_by_address=False,
    answers_pings=False,
)
BEHAVIOR = {
    "ebpf": _NFTABLES._replace(
        by_packet=False,
        masquerades_here=False,
        relays_loopback=False,
        unused_cluster_ips=Unused.REJECTED,
        node_port_instead=NodePortInstead.NEVER,
        flows_end_later=False,
        leaves_terminating=True,
        answers_pings=True,
    ),
    "nftables": _NFTABLES,
    "iptables": _NFTABLES._replace(
        loopback=frozenset({Family.IPV4}),
        relays_loopback=False,
        unused_cluster_ips=Unused.ROUTED,
        rejects_external_of_node=False,
        rejects_node_ports_everywhere=True,
        ranges_need_endpoints=True,
        node_port_instead=NodePortInstead.IF_UNTRANSLATED,
    ),
    # A removed UDP real server is deleted with its flows.
    "ipvs": _NFTABLES._replace(
        has_addresses=True,
        loopback=frozenset(),
        relays_loopback=False,
        unused_cluster_ips=Unused.ROUTED,
        node_port_instead=NodePortInstead.NEVER,
        leaves_terminating=True,
        at_output=True,
        one_list=True,
        ends_with_service=True,
        takes_answers=True,
        affinity_by_address=True,
        answers_pings=True,
    ),
    "userspace": _NFTABLES._replace(
        by_packet=False,
        by_relay=True,
        has_addresses=True,
        relays_loopback=False,
        unused_cluster_ips=Unused.ROUTED,
        ranges_need_endpoints=True,
        node_port_instead=NodePortInstead.IF_NOTHING_LISTENS,
        flows_end_later=False,
        answers_pings=True,
    ),
}
"""By the name of the mode."""
