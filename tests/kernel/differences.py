"""What each mode does otherwise than the others, and why: for the tests that run for all of them.

What is not here they have in common. docs/dataplanes/README.md tells users the same.
"""

import socket
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import DENIED, REFUSED, SILENT
from tests.kernel.cluster import eventually


class Differences(NamedTuple):
    """Those of one mode."""

    by_packet: bool
    """Only packets are rejected or dropped, by netfilter. REJECT and DROP where the node itself sends give a
    datagram's sender EPERM (nf_hook_slow); a TCP client is told by an ICMP error, which a connect() that
    has its socket locked passes over (tcp_v4_err): then it is the next SYN that is rejected, a second later;
    and a datagram's sender without a peer is told nothing."""

    masquerades_here: bool
    """With policy Cluster a client outside, and a pod that dials another address than the ClusterIP, are
    masqueraded at this node's endpoints, too (KUBE-EXT-*, KUBE-MARK-MASQ): kube-proxy knows no better."""

    loopback: frozenset[socket.AddressFamily]
    """The families in which the node reaches NodePorts at its loopback. route_localnet is IPv4's, and
    kube-proxy's nftables mode has given it up (KEP-3866)."""

    other_port: str
    """The outcome at another port of a ClusterIP: kube-proxy's nftables mode rejects it (KEP-3866)."""

    own_external: str
    """What the node gets over TCP at an external or load balancer IP without endpoints. The chain
    KUBE-EXTERNAL-SERVICES hangs in INPUT and FORWARD, and not in OUTPUT."""

    flows_end_later: bool
    """UDP flows are ended once the rules are in force, and no sync waits for it: a moment later."""

    leaves_terminating: bool
    """A UDP client goes on to a ready endpoint. Netfilter's modes end flows to endpoints that do not serve
    any more, as kube-proxy does (pkg/proxy/conntrack/cleanup.go), and a terminating one may well serve."""

    at_output: bool
    """What the node itself sends is for IPVS where it is sent (ip_vs_ops[]): so a NodePort without endpoints
    gives EPERM like other addresses."""

    one_list: bool
    """With externalTrafficPolicy Local and endpoints on this node, pods and the node are given those alone: a
    virtual server has one list of real servers for all."""

    ends_with_service: bool
    """Open connections do when it is deleted, since they are its virtual server's; so with kube-proxy."""

    takes_answers: bool
    """Of UDP: what comes to a NodePort is a call for the Service, be it the answer to what the node has asked
    from that port. IPVS looks at each packet that it knows no connection of."""

    affinity_by_address: bool
    """A client has an endpoint for each address of a Service: IPVS knows of virtual servers, not of Services.
    That it is the same one is chance, which holds as long as all have met the same clients in one order."""

    answers_pings: bool
    """At the addresses of Services. For netfilter, no rule of kube-proxy's translates ICMP."""

    def to_node(self, protocol: Protocol, outcome: str) -> str:
        """What comes of it for a client that is the node itself."""
        told_by_errno = self.by_packet and protocol is Protocol.UDP and outcome in (REFUSED, SILENT)
        return DENIED if told_by_errno else outcome

    def to(self, client: str, protocol: Protocol, outcome: str) -> str:
        """As `to_node` where the client's class of sources is "node"; else the outcome as it is."""
        return self.to_node(protocol, outcome) if client == "node" else outcome

    def refusal_takes(self, protocol: Protocol, at_once: float) -> float:
        """Seconds in which a rejection comes, where the other modes need less than `at_once`."""
        return 2.0 if self.by_packet and protocol is Protocol.TCP else at_once

    def await_flow(self, ask: Callable[[], str], wanted: str) -> None:
        """Assert that this is what a client with a UDP flow gets, whose endpoint went."""
        if self.flows_end_later:
            eventually(lambda: ask() == wanted, f"the flow is ended, so that the outcome is {wanted}")
        else:
            assert ask() == wanted


_NFTABLES = Differences(
    by_packet=True,
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
    # A real server of UDP that is not wanted is deleted with its flows; all addresses are the node's own.
    "ipvs": _NFTABLES._replace(
        leaves_terminating=True,
        at_output=True,
        one_list=True,
        ends_with_service=True,
        takes_answers=True,
        affinity_by_address=True,
        answers_pings=True,
    ),
}
"""By the name of the mode."""
