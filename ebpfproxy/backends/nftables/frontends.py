"""Which frontends elements are about, be they a previous run's or kube-proxy's. Pure."""

from collections.abc import Iterable, Iterator

from ebpfproxy.backends.nftables.entries import Element, Key
from ebpfproxy.backends.nftables.node_objects import (
    NO_ENDPOINT_NODE_PORTS,
    NO_ENDPOINT_SERVICES,
    SERVICE_IPS,
    SERVICE_NODE_PORTS,
)
from ebpfproxy.model.address import Protocol, parse_address, unspecified
from ebpfproxy.plan.service_plan import Frontend

_OF_ADDRESSES = {SERVICE_IPS, NO_ENDPOINT_SERVICES}
_OF_NODE_PORTS = {SERVICE_NODE_PORTS, NO_ENDPOINT_NODE_PORTS}


def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
    """What is translated, rejected or dropped.

    >>> from ebpfproxy.model.address import Family
    >>> keys = (
    ...     Element(Family.IPV4, "service-ips", "10.96.0.1 . udp . 53"),
    ...     Element(Family.IPV6, "no-endpoint-nodeports", "udp . 30053"),
    ...     Element(Family.IPV4, "cluster-ips", "10.96.0.1"),
    ... )
    >>> [str(each) for each in frontends(keys)]
    ['10.96.0.1:53/UDP', '[::]:30053/UDP']
    """
    for key in keys:
        if not isinstance(key, Element):
            continue
        words = key.key.split(" . ")
        if key.container in _OF_NODE_PORTS:
            words.insert(0, "")
        elif key.container not in _OF_ADDRESSES:
            continue
        address, name, port = words
        protocol = Protocol.__members__.get(name.upper())
        if protocol:
            dialled = parse_address(address) if address else unspecified(key.family)
            yield Frontend(dialled, int(port), protocol)
