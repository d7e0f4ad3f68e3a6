"""The outcomes in which the modes differ (`backends/behavior.py`), for tests that run with all modes."""

import socket
from collections.abc import Callable

from ebpfproxy.backends.behavior import BEHAVIOR, Behavior, Unused
from ebpfproxy.model.address import Family, Protocol
from tests.kernel.clients import DENIED, REFUSED, SILENT
from tests.kernel.cluster import eventually

_SOCKET_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}


class Differences(Behavior):
    """The behavior of one mode, and the outcomes that follow from it."""

    def at_loopback(self, protocol: Protocol, address: str, outcome: str) -> str:
        """The outcome for the node at a NodePort at a loopback address, given that at other addresses."""
        family = socket.AF_INET6 if ":" in address.removeprefix("::ffff:") else socket.AF_INET
        is_served = family in {_SOCKET_FAMILIES[each] for each in self.loopback}
        if self.relays_loopback and protocol is not Protocol.TCP:
            return REFUSED
        if (self.by_relay or self.relays_loopback) and address == "127.0.0.2":
            return REFUSED
        return outcome if is_served else REFUSED

    @property
    def other_port(self) -> str:
        """The outcome at another port of a ClusterIP."""
        return REFUSED if self.has_addresses or self.unused_cluster_ips is not Unused.ROUTED else SILENT

    @property
    def without_service(self) -> str:
        """The outcome at an address of a ServiceCIDR that no Service has."""
        return REFUSED if self.unused_cluster_ips is Unused.REJECTED else SILENT

    @property
    def own_external(self) -> str:
        """The outcome for the node over TCP at an external or load balancer IP without endpoints."""
        return REFUSED if self.rejects_external_of_node else SILENT

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


DIFFERENCES = {name: Differences(*behavior) for name, behavior in BEHAVIOR.items()}
"""By the name of the mode."""
