"""What the API server and the kernel reported, at one moment."""

import dataclasses
from collections.abc import Mapping

from ebpfproxy.model.address import Network
from ebpfproxy.model.device import Device
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName, Service

NO_SLICES: Mapping[NamespacedName, EndpointSlice] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterState:
    """A snapshot: its mappings are never changed once it is made.

    `slices` is by Service, then by the slice's own name; a Service without slices has no entry, and
    slices of a Service that does not (yet) exist are kept. `node` is None until our Node was seen.
    `local_networks` is the kernel's local table: what this node would deliver to itself, mostly
    single addresses, and whole networks such as 127.0.0.0/8. `devices` are all of this node, sorted by
    ifindex; `bypassing` the indexes of those whose pods reach Services by no program of ours.
    """

    services: Mapping[NamespacedName, Service]
    slices: Mapping[NamespacedName, Mapping[NamespacedName, EndpointSlice]]
    node: Node | None = None
    local_networks: frozenset[Network] = frozenset()
    devices: tuple[Device, ...] = ()
    bypassing: frozenset[int] = frozenset()

    def slices_of(self, service: NamespacedName) -> Mapping[NamespacedName, EndpointSlice]:
        return self.slices.get(service, NO_SLICES)
