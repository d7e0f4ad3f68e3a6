"""`DumpView`: the rows that describe the maps, from the kernel (tables.py) or from a file (saved.py).

An entry is orphaned if something that it refers to, or that would use it, is gone. The column `orphaned` says
what. It is "" for all other entries.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ebpfproxy.backends.ebpf.inspect.client_view import AffinityRow, SocketRow
from ebpfproxy.backends.ebpf.inspect.device_view import DeviceRow
from ebpfproxy.backends.ebpf.inspect.flow_view import FlowRow, TranslationRow
from ebpfproxy.model.counters import ServiceTraffic


class ServiceRow(NamedTuple):
    """One frontend.

    `internal` and `external` are the endpoints for clients on this node and for other clients, sorted.
    `policy` is the traffic policy of these lists: "Cluster", "Local", or both as "Cluster/Local". `affinity`
    is a timeout in seconds, 0 for none. `internal_slots` and `external_slots` are the ranges of the lists in
    the map `slots`, as "FIRST+COUNT", "" for an empty list. `algorithm` selects one of their entries,
    `slow_start` is in seconds, 0 for none. `orphaned`: the service id has no name. `family`:
    "IPv4" or "IPv6", since the address of a NodePort is "*" in both; "" in a dump of an earlier version.
    """

    service: str
    kind: str
    protocol: str
    address: str
    port: int
    internal: list[str]
    external: list[str]
    policy: str
    affinity: int
    flags: list[str]
    id: int
    internal_slots: str
    external_slots: str
    algorithm: str = "random"
    slow_start: int = 0
    orphaned: str = ""
    family: str = ""


class EndpointRow(NamedTuple):
    """One endpoint.

    `lists`: the lists ("cluster", "local") by which new connections use it. Empty: draining. `weight`: its
    share of new connections, relative to other endpoints. `orphaned`: no frontend has its service id, or no
    slot of these frontends has it although it is in their list.

    `tunnel`: with direct server return, the node that gets tunneled packets to the endpoint, or "here" if
    this node accepts them; else "".
    """

    service: str
    protocol: str
    address: str
    port: int
    lists: list[str]
    on_node: bool
    id: int
    service_id: int
    weight: int = 1
    orphaned: str = ""
    tunnel: str = ""


class RangeRow(NamedTuple):
    """A network whose clients the restricted frontends of a Service admit. `orphaned`: the service id has no
    name."""

    service: str
    network: str
    service_id: int
    orphaned: str = ""


class NetworkRow(NamedTuple):
    """A network of the node. `local`: the node delivers packets to it locally. `node_ports`: NodePorts are
    served at its addresses. `service_cidr`: connections to its unused addresses are rejected. None of these:
    its addresses may be those of other machines."""

    network: str
    local: bool
    node_ports: bool
    service_cidr: bool = False


class SettingRow(NamedTuple):
    """A setting of the programs: a field of abi.h's struct node. Timeouts are in seconds."""

    setting: str
    value: int


class CounterRow(NamedTuple):
    """One counter. `value` is the sum over all CPUs."""

    counter: str
    value: int
    per_cpu: list[int]


class MapRow(NamedTuple):
    """A map with the number of its entries in use, and its capacity.

    In arrays, entries in force count. Half-open flows that are over do not count.
    """

    map: str
    entries: int
    room: int


class DumpView(Protocol):
    """The rows of each section of a dump. Close with `close`.

    A saved view raises ConfigError for a section that its file does not have.
    """

    def services(self) -> Sequence[ServiceRow]:
        """Sorted by service name, then address and port."""

    def endpoints(self) -> Sequence[EndpointRow]:
        """Sorted by service name, then address and port."""

    def ranges(self) -> Sequence[RangeRow]:
        """Source ranges, sorted by service name and network."""

    def affinity(self) -> Sequence[AffinityRow]:
        """Affinities, the most recently used first."""

    def sockets(self) -> Sequence[SocketRow]:
        """Connected sockets, then unconnected ones, sorted by service, cookie and frontend address."""

    def conntrack(self) -> Iterable[FlowRow]:
        """The packet path's flows, sorted by client and frontend."""

    def nat(self) -> Iterable[TranslationRow]:
        """How the packet path translates packets, sorted by client and frontend."""

    def devices(self) -> Sequence[DeviceRow]:
        """The devices of the packet path, by ifindex."""

    def networks(self) -> Sequence[NetworkRow]:
        """Networks of the node, sorted by address and length."""

    def settings(self) -> Sequence[SettingRow]:
        """The settings of the programs, in the order of abi.h's struct node."""

    def counters(self) -> Sequence[CounterRow]:
        """Events in the programs, in the order of abi.h's enum counter."""

    def traffic(self) -> Sequence[ServiceTraffic]:
        """The packet path's traffic, sorted by service."""

    def maps(self) -> Sequence[MapRow]:
        """The use of each map."""

    @property
    def counts_services(self) -> bool:
        """Whether the agent counts the traffic of some services separately."""

    def close(self) -> None: ...
