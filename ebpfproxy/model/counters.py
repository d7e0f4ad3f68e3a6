"""Counters that backends report for metrics: traffic by Service, sockets of removed endpoints, and syncs."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import Family, Protocol

OTHER = "other"
"""`ServiceTraffic.service` of the sum of all ServicePorts that are not counted separately."""


class ServiceTraffic(NamedTuple):
    """Traffic of one ServicePort in one family through the packet path.

    Values are sums over all CPUs since the ServicePort got its id in the maps. `in` is towards endpoints,
    `out` is towards clients. Bytes are those of IP packets. A GSO packet counts as one packet.

    `service` is "namespace/name:port", or "namespace/name" for an unnamed port. `protocol` is the result of
    `protocol_name`. `family` is "IPv4" or "IPv6". For OTHER, both are "".
    """

    service: str
    protocol: str
    family: str
    new_flows: int
    packets_in: int
    bytes_in: int
    packets_out: int
    bytes_out: int


class SocketCounts(NamedTuple):
    """Connected UDP sockets whose endpoint was removed, counted in one search.

    `reconnected`, `destroyed` and `not_destroyed` count what this search did; add them up over searches.
    After the search, `left` sockets are stale, and the packet path translates the packets of `translated`
    sockets.
    """

    reconnected: int = 0
    destroyed: int = 0
    not_destroyed: int = 0
    left: int = 0
    translated: int = 0


class IptablesCounts(NamedTuple):
    """Rules and failures in one family since the mode is open, as kube-proxy counts them.

    - `restore_failures`: failed runs of iptables-restore.
    - `partial_failures`: those of them that wrote only changes, without reading the tables before. None if
      the mode does not distinguish them.
    - `rules`: by table, the own rules in the kernel. Empty if the mode does not count rules.
    - `rules_last`: by table, the rules that the last sync wrote.
    """

    family: Family
    restore_failures: int = 0
    partial_failures: int | None = 0
    rules: Mapping[str, int] = {}
    rules_last: Mapping[str, int] = {}


class NftablesCounts(NamedTuple):
    """Failures in one family since the mode is open.

    - `sync_failures`: syncs of which the kernel rejected a part or all.
    - `cleanup_failures`: failed deletions of chains that are no longer in use.
    """

    family: Family
    sync_failures: int = 0
    cleanup_failures: int = 0


class LocalhostCounts(NamedTuple):
    """NodePorts on loopback in one family of mode nftables.

    - `listeners`: how many are relayed now.
    - `listener_failures`: failed attempts to listen since the mode is open.
    - `rejected_packets`: by protocol, since the tables were created.
    """

    family: Family
    listeners: int
    listener_failures: int
    rejected_packets: Mapping[Protocol, int]


class PacketCounts(NamedTuple):
    """Packets that rules of mode iptables count, in both families, also of earlier runs of the agent. None:
    there is no such counter.

    - `invalid_dropped`: dropped because conntrack marks them INVALID.
    - `localhost_node_ports`: first packets of connections to NodePorts on 127.0.0.0/8.
    """

    invalid_dropped: int | None
    localhost_node_ports: int | None


SyncCounts = IptablesCounts | NftablesCounts | LocalhostCounts | PacketCounts
"""What the current mode reports in the names of kube-proxy's metrics."""


class TableUse(NamedTuple):
    """The number of entries in a table of limited size, and its capacity."""

    entries: int
    capacity: int


class Report(NamedTuple):
    """What a mode counts, for metrics. Empty for a mode that has nothing of the kind.

    - `usage`: entries and capacity of tables, by name, such as that of a BPF map.
    - `events`: the number of events of the data plane since it was started, by reason.
    - `traffic`: the traffic of each ServicePort.
    - `syncs`: what only this mode counts in its syncs, by family.
    """

    usage: Mapping[str, TableUse] = {}
    events: Mapping[str, int] = {}
    traffic: Collection[ServiceTraffic] = ()
    syncs: tuple[SyncCounts, ...] = ()
