"""EndpointSlice (discovery.k8s.io/v1), as far as a proxy reads it."""

import dataclasses
from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, Protocol
from ebpfproxy.model.service import NamespacedName


class Endpoint(NamedTuple):
    """One of endpoints: its first address, its conditions with the API's defaults filled in, and hints.

    `node` is "" where the slice names none. `zones` and `nodes` are hints.forZones and hints.forNodes,
    empty where there is no hint. Never derive ready from serving and terminating: with
    publishNotReadyAddresses an endpoint is ready and terminating at once.
    """

    address: Address
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node: str = ""
    zones: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()


class EndpointPort(NamedTuple):
    """One of ports; a port without a name or a number is no value."""

    name: str
    protocol: Protocol
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointSlice:
    """`service` is the Service that the label kubernetes.io/service-name points to, in its own namespace.

    `trigger_time` is the annotation endpoints.kubernetes.io/last-change-trigger-time in Unix seconds,
    None where it is missing or junk.
    """

    name: NamespacedName
    service: NamespacedName
    family: Family
    ports: tuple[EndpointPort, ...]
    endpoints: tuple[Endpoint, ...]
    trigger_time: float | None = None
