"""The differences between the modes and their reasons, for tests that run with all modes.

All other behavior is the same in all modes. docs/dataplanes/README.md lists the differences for users.
"""

import socket
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import DENIED, REFUSED, SILENT
from tests.kernel.cluster import eventually


class Differences(NamedTuple):
    """The differing properties of one mode."""

    by_packet: bool
    """Packets are rejected or dropped by netfilter, not system calls by hooks. On the node itself, REJECT and
    DROP return EPERM to a sender of datagrams (nf_hook_slow). A TCP client gets an ICMP error, which
    connect() ignores while it holds the socket lock (tcp_v4_err): then the next SYN is rejected, a second
    later. An unconnected datagram socket gets no error."""

    by_relay: bool
    """Connections end at processes of the agent, which end with it. The kernel rejects packets to ports
    without a listener, which an unconnected datagram socket does not notice. A NodePort is reachable at the
    addresses of the node's devices, which include only one of 127.0.0.0/8."""

    masquerades_here: bool
    """With policy Cluster, external clients, and pods that connect to another address than the ClusterIP, are
    masqueraded even if the endpoint is on this node (KUBE-EXT-*, KUBE-MARK-MASQ), as with kube-proxy."""

    loopback: frozenset[socket.AddressFamily]
    """The families in which the node reaches NodePorts at loopback addresses. route_localnet exists only for
    IPv4, and kube-proxy's nftables mode does not use it (KEP-3866)."""

    other_port: str
    """The outcome at another port of a ClusterIP: kube-proxy's nftables mode rejects it (KEP-3866)."""

    own_external: str
    """The outcome for the node over TCP at an external or load balancer IP without endpoints. INPUT and
    FORWARD jump to the chain KUBE-EXTERNAL-SERVICES, OUTPUT does not."""

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
    """With externalTrafficPolicy Local and endpoints on this node, pods and the node also get only these: a
    virtual server has one list of real servers for all clients."""

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
    """Service addresses answer pings. In netfilter's modes, no rule of kube-proxy translates ICMP."""

    def to_node(self, protocol: Protocol, outcome: str) -> str:
        """The outcome for a client on the node itself, given the outcome for other clients."""
        gets_eperm = self.by_packet and protocol is Protocol.UDP and outcome in (REFUSED, SILENT)
        return DENIED if gets_eperm else outcome

    def to(self, client: str, protocol: Protocol, outcome: str) -> str:
        """As `to_node` if the client's class of sources is "node"; otherwise the unchanged outcome."""
        return self.to_node(protocol, outcome) if client == "node" else outcome

    def most_retransmissions(self) -> int:
        """How often a TCP client may send its SYN again before it is rejected: see `by_packet`."""
        return 1 if self.by_packet else 0

    def await_flow(self, ask: Callable[[], str], wanted: str) -> None:
        """Assert that a client with a UDP flow gets this outcome after its endpoint was removed."""
        if self.flows_end_later:
            eventually(lambda: ask() == wanted, f"the flow is ended, so that the outcome is {wanted}")
        else:
            assert ask() == wanted


_NFTABLES = Differences(
    by_packet=True,
    by_relay=False,
    masquerades_here=True,
    loopback=frozenset(),
    other_port=REFUSED,
    own_external=REFUSED,
    flows_end_later=True,
    leaves_terminating=False,
    at_output=False,
    one_list=False,
    ends_with_service=False,
    takes_answers=False,
    affinity_by_address=False,
    answers_pings=False,
)
DIFFERENCES = {
    "ebpf": Differences(
        by_packet=False,
        by_relay=False,
        masquerades_here=False,
        loopback=frozenset({socket.AF_INET, socket.AF_INET6}),
        other_port=SILENT,
        own_external=REFUSED,
        flows_end_later=False,
        leaves_terminating=True,
        at_output=False,
        one_list=False,
        ends_with_service=False,
        takes_answers=False,
        affinity_by_address=False,
        answers_pings=True,
    ),
    "nftables": _NFTABLES,
    "iptables": _NFTABLES._replace(
        loopback=frozenset({socket.AF_INET}), other_port=SILENT, own_external=SILENT
    ),
    # A removed UDP real server is deleted with its flows; all Service addresses are local to the node.
    "ipvs": _NFTABLES._replace(
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
        loopback=frozenset({socket.AF_INET, socket.AF_INET6}),
        flows_end_later=False,
        answers_pings=True,
    ),
}
"""By the name of the mode."""
