"""What the packet path has carried, by service."""

from typing import NamedTuple


class ServiceTraffic(NamedTuple):
    """Of one ServicePort in one family, summed over the CPUs, since the service has its id: `in` is to
    endpoints, `out` to clients. Bytes are those of IP packets; a GSO packet is one.

    `service` is "namespace/name:port", or "namespace/name" for an unnamed port; `protocol` as
    `protocol_name` gives it; `family` is IPv4 or IPv6.
    """

    service: str
    protocol: str
    family: str
    new_flows: int
    packets_in: int
    bytes_in: int
    packets_out: int
    bytes_out: int
