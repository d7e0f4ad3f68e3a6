"""Events from a source to the control thread. Each is complete: objects have no guaranteed order."""

from typing import NamedTuple

from ebpfproxy.model.address import Network
from ebpfproxy.model.device import Device
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName, Service

SERVICE, ENDPOINT_SLICE, NODE = "Service", "EndpointSlice", "Node"
ADDRESSES, DEVICES = "addresses", "devices"


class ServiceChanged(NamedTuple):
    """`service` is None where it is gone, or is none that a proxy serves (headless, ExternalName).

    `complaints` are the parts of the object that were left out, one line each; the rest is served.
    """

    name: NamespacedName
    service: Service | None
    complaints: tuple[str, ...] = ()


class SliceChanged(NamedTuple):
    """`slice` is None where it is gone, or belongs to no Service. `complaints` as in ServiceChanged."""

    name: NamespacedName
    slice: EndpointSlice | None
    complaints: tuple[str, ...] = ()


class NodeChanged(NamedTuple):
    """Our own Node; None where it is gone."""

    node: Node | None


class AddressesChanged(NamedTuple):
    """The whole local table of the kernel, each time."""

    networks: frozenset[Network]


class DevicesChanged(NamedTuple):
    """All network devices of this node, each time, in any order."""

    devices: tuple[Device, ...]


class PodsBypass(NamedTuple):
    """Devices of pods whose packets were seen to reach a Service by no program of ours.

    It may name those seen lately, or all: one that was named counts as long as the device exists.
    """

    ifindexes: frozenset[int]


class Synced(NamedTuple):
    """All existing objects of `kind` (a constant of this file) were reported. May come again."""

    kind: str


class Invalid(NamedTuple):
    """An object that cannot be served. What was known of it before stays.

    `name` is "namespace/name", or where in a file it stands, when it has no readable name.
    """

    kind: str
    name: str
    reason: str


Event = (
    ServiceChanged
    | SliceChanged
    | NodeChanged
    | AddressesChanged
    | DevicesChanged
    | PodsBypass
    | Synced
    | Invalid
)
