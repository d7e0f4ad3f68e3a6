"""EndpointSlice (discovery.k8s.io/v1): the fields that a service proxy reads."""

import dataclasses
from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, Protocol
from ebpfproxy.model.service import NamespacedName


class Endpoint(NamedTuple):
    """One element of `endpoints`: its first address, its conditions and its hints.

    Conditions that are missing have the API's defaults. `node` is "" if nodeName is missing. `zones` and
    `nodes` are hints.forZones and hints.forNodes, empty without a hint.

    Do not derive `ready` from `serving` and `terminating`: with publishNotReadyAddresses an endpoint can be
    both ready and terminating.
    """

    address: Address
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node: str = ""
    zones: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()


class EndpointPort(NamedTuple):
    """One element of `ports`. A port without a name or a number is left out."""

    name: str
    protocol: Protocol
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointSlice:
    """One EndpointSlice.

    `service` is the Service of the label kubernetes.io/service-name, in the namespace of the EndpointSlice.
    `trigger_time` is the annotation endpoints.kubernetes.io/last-change-trigger-time in Unix seconds, None
    if it is missing or invalid.
    """

    name: NamespacedName
    service: NamespacedName
    family: Family
    ports: tuple[EndpointPort, ...]
    endpoints: tuple[Endpoint, ...]
    trigger_time: float | None = None
