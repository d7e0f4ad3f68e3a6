"""Counters that backends report for metrics: traffic by Service, and sockets of removed endpoints."""

from typing import NamedTuple

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
