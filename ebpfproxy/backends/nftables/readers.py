"""Entries of mode nftables as texts, and the frontends in the keys of a previous run."""

from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from typing import Any

from ebpfproxy.backends.nftables.entries import Element, Endpoints, Key, endpoint_bytes
from ebpfproxy.backends.nftables.node_objects import (
    NO_ENDPOINT_NODE_PORTS,
    NO_ENDPOINT_SERVICES,
    SERVICE_IPS,
    SERVICE_NODE_PORTS,
)
from ebpfproxy.model.address import Protocol, parse_address, unspecified
from ebpfproxy.plan.service_plan import Frontend

_IPV4 = 4  # bytes of an address


def shown(key: Key, entry: Any) -> Any:
    """Return an entry for readers: a list of endpoints as texts.

    >>> from ebpfproxy.model.address import Family
    >>> shown(Endpoints(Family.IPV4, bytes(8)), bytes([10, 0, 0, 1, 0, 80, 0, 0]) + bytes(8))
    ('10.0.0.1:80', '')
    """
    if not isinstance(key, Endpoints):
        return entry
    size = endpoint_bytes(key.family)
    return tuple(_endpoint_text(entry[at : at + size]) for at in range(0, len(entry), size))


def _endpoint_text(packed: bytes) -> str:
    """Address and port, "" for a place without an element."""
    if not any(packed):
        return ""
    address, port = packed[:-4], int.from_bytes(packed[-4:-2], "big")
    return f"{ip_address(address)}:{port}" if len(address) == _IPV4 else f"[{ip_address(address)}]:{port}"


_WITH_ADDRESS = {SERVICE_IPS, NO_ENDPOINT_SERVICES}
_WITHOUT_ADDRESS = {SERVICE_NODE_PORTS, NO_ENDPOINT_NODE_PORTS}


def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
    """Yield the frontends that elements translate, reject or drop, including those of a previous run or of
    kube-proxy.

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
        if key.container in _WITHOUT_ADDRESS:
            words.insert(0, "")
        elif key.container not in _WITH_ADDRESS:
            continue
        address, name, port = words
        protocol = Protocol.__members__.get(name.upper())
        if protocol:
            destination = parse_address(address) if address else unspecified(key.family)
            yield Frontend(destination, int(port), protocol)
