"""The settings and entries of mode userspace. Agent and relays use the same types."""

import dataclasses
import os
from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, Network, Protocol, format_address
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.service_plan import Frontend


@dataclasses.dataclass(frozen=True, slots=True)
class UserspaceSettings:
    """What all relays need.

    - `relays`: their number.
    - Timeouts in seconds: of established TCP connections, of those that one side has closed, of UDP flows
      whose last datagram was a reply, and of those that wait for a reply.
    - `udp_flows`, `affinity_clients`: the largest numbers of UDP flows and of clients with affinity, in each
      relay.
    """

    relays: int = 1
    tcp_timeout: float = 24 * 3600.0
    tcp_closing_timeout: float = 3600.0
    udp_timeout: float = 0.25
    udp_unreplied_timeout: float = 30.0
    udp_flows: int = 65536
    affinity_clients: int = 65536


def one_per_cpu() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


PORT_BIT = 0x8000
"""The bit in which the other port of a port differs; see `other_port`."""


class Local(NamedTuple):
    """The key of an address of a Service. The entry is True: the node must treat the address as local."""

    family: Family
    address: Address

    def __str__(self) -> str:
        return f"address {format_address(self.address)}"


class Balanced(NamedTuple):
    """The key of a ServicePort. The entry is `Balancing`.

    `service` is "namespace/name:port", or "namespace/name" for an unnamed port.
    """

    family: Family
    service: str
    protocol: Protocol

    def __str__(self) -> str:
        return f"endpoints of {self.service} {self.protocol.name} {self.family.value}"


class Listen(NamedTuple):
    """The key of a frontend. The entry is `Listening`, or True without endpoints: its packets are rejected.

    A NodePort has the unspecified address of its family: each address in `NodePorts`. False is the entry of a
    frontend that a previous run left redirected, without a listener.
    """

    family: Family
    frontend: Frontend

    def __str__(self) -> str:
        return f"listener {self.frontend}"


class NodePorts(NamedTuple):
    """The key of the addresses at which NodePorts are reachable. The entry is a sorted tuple of them."""

    family: Family

    def __str__(self) -> str:
        return f"addresses of NodePorts {self.family.value}"


class Balancing(NamedTuple):
    """How clients of a ServicePort are distributed.

    - `rows`: the endpoints, as in `PlannedEndpoints`.
    - `affinity_timeout`: in seconds, 0 without session affinity.
    - `algorithm`: the value of an `Algorithm`.
    - `weights`: of the endpoints, in their order. Empty if all have weight 1.
    """

    rows: bytes
    affinity_timeout: int = 0
    algorithm: str = Algorithm.ROUND_ROBIN.value
    weights: tuple[int, ...] = ()


class Pods(NamedTuple):
    """What identifies pods among clients: as `LocalTraffic`."""

    network: Network | None
    interface: str
    prefix: bool


class Listening(NamedTuple):
    """Which endpoints the clients of a frontend may use: those of scope Local, or those of scope Cluster.

    - `port`: at which relays listen. If it is not the port of the frontend, packets are redirected to it.
    - `pod_local`, `node_local`, `outside_local`: for the three classes of clients in `FrontendPlan`.
    - `pods`: None if pods are not distinguished from clients outside.
    - `ranges`: if not None, only clients in these networks are admitted, and the node if `node_admitted`.
    """

    service: Balanced
    port: int
    pod_local: bool
    node_local: bool
    outside_local: bool
    pods: Pods | None = None
    ranges: tuple[Network, ...] | None = None
    node_admitted: bool = True


Key = Local | Balanced | Listen | NodePorts
Entry = bool | Balancing | Listening | tuple[Address, ...]


def other_port(port: int) -> int:
    """Return the port at which relays listen for a frontend with this port, if packets are redirected.

    No other port has the same one. 32768 has none, and is returned.

    >>> other_port(443), other_port(33211), other_port(32768)
    (33211, 443, 32768)
    """
    return port ^ PORT_BIT or port
