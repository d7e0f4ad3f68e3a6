"""Events from a source to the control thread.

Each event carries the complete new state of its object, because objects arrive in no guaranteed order.
"""

from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, Network
from ebpfproxy.model.cluster import Listening
from ebpfproxy.model.device import Device
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.namespace import Namespace
from ebpfproxy.model.node import Node, PeerNode
from ebpfproxy.model.node_check import NodeCheck
from ebpfproxy.model.pod import Pod
from ebpfproxy.model.service import NamespacedName, Service, ServicePortName
from ebpfproxy.plan.reason import AnyReason

SERVICE, ENDPOINT_SLICE, NODE, POD = "Service", "EndpointSlice", "Node", "Pod"
NAMESPACE = "Namespace"
PEER_NODE = "PeerNode"
"""Any Node, with what this machine needs of it; `NODE` is this node's."""
SERVICE_CIDR = "ServiceCIDR"
DISPENSABLE = frozenset({NODE, PEER_NODE, SERVICE_CIDR, NAMESPACE})
"""The kinds without which Services are served, if the server does not have them or does not permit them."""
ADDRESSES, DEVICES, LISTENING = "addresses", "devices", "listening sockets"


class Unserved(AnyReason):
    """Why no service proxy serves a Service."""

    EXTERNAL_NAME = "frontend: the Service is an alias in DNS"
    HEADLESS = "frontend: the Service is headless: clients get its endpoints from DNS"
    NO_CLUSTER_IP = "frontend: the Service has no ClusterIP yet"
    OTHER_PROXY = "frontend: a label assigns the Service to another proxy"


class Excess(NamedTuple):
    """An annotation that is ignored because it exceeds a bound, and which one."""

    annotation: str
    reason: str


class ServiceChanged(NamedTuple):
    """A Service was added, changed or deleted.

    `service` is None if the Service was deleted or if no proxy serves it; then `unserved` is the reason.
    `complaints` describe the parts of the object that were left out, one line each; the rest is served.
    `excess` is also one of them. `uid`: the UID of the object if there may be an Event about it, else "".
    """

    name: NamespacedName
    service: Service | None
    complaints: tuple[str, ...] = ()
    unserved: Unserved | None = None
    excess: Excess | None = None
    uid: str = ""


class SliceChanged(NamedTuple):
    """An EndpointSlice was added, changed or deleted.

    `slice` is None if it was deleted or belongs to no Service. `complaints` are as in ServiceChanged.
    """

    name: NamespacedName
    slice: EndpointSlice | None
    complaints: tuple[str, ...] = ()


class PodChanged(NamedTuple):
    """A pod was added, changed or deleted.

    `pod` is None if it was deleted, has ended, or shares the network namespace of its node. `complaints` are
    as in ServiceChanged.
    """

    name: NamespacedName
    pod: Pod | None
    complaints: tuple[str, ...] = ()


class NamespaceChanged(NamedTuple):
    """A Namespace was added, changed or deleted. `socket_lb`: its annotation; None if it has none or was
    deleted. `complaints` are as in ServiceChanged."""

    name: str
    socket_lb: bool | None
    complaints: tuple[str, ...] = ()


class NodeChanged(NamedTuple):
    """The Node object of this node; None if it was deleted."""

    node: Node | None


class PeerChanged(NamedTuple):
    """A Node of the cluster was added, changed or deleted; `peer` is None if it was deleted."""

    name: str
    peer: PeerNode | None


class ServiceCidrChanged(NamedTuple):
    """A ServiceCIDR was added, changed or deleted; then it has no `networks`. `complaints` are as in
    ServiceChanged."""

    name: str
    networks: tuple[Network, ...]
    complaints: tuple[str, ...] = ()


class ChecksChanged(NamedTuple):
    """All checks of nodes that have failed often enough, for an edge."""

    down: frozenset[NodeCheck]


class AddressesChanged(NamedTuple):
    """The complete local routing table of the kernel."""

    networks: frozenset[Network]


class ListeningChanged(NamedTuple):
    """All addresses and ports at which programs of this node listen."""

    listening: Listening


class ApiServerReached(NamedTuple):
    """The agent has connected to the API server at this address and TCP port."""

    address: Address
    port: int


class DevicesChanged(NamedTuple):
    """All network devices of this node, in any order."""

    devices: tuple[Device, ...]


class PodsBypass(NamedTuple):
    """Pod devices with packets that reached a Service frontend past the agent's programs.

    The event may name all such devices or only the recent ones. A device that was named once counts until
    it is deleted.
    """

    ifindexes: frozenset[int]


class NetworkNamespacesChanged(NamedTuple):
    """All network namespaces that may be those of pods, by cookie."""

    namespaces: tuple[Namespace, ...]


class EndpointsFull(NamedTuple):
    """The endpoints of a ServicePort that get no new connections for now: see `ClusterState.full`."""

    service: ServicePortName
    family: Family
    targets: frozenset[bytes]


class Synced(NamedTuple):
    """All existing objects of `kind` (a constant of this file) were reported, or an optional kind cannot be
    listed now. It may be sent repeatedly."""

    kind: str


class Invalid(NamedTuple):
    """An object that cannot be served. Its last good state stays in effect.

    `name` is "namespace/name". If the object has no readable name, it is the file and line.
    """

    kind: str
    name: str
    reason: str


Event = (
    ServiceChanged
    | SliceChanged
    | PodChanged
    | NamespaceChanged
    | NodeChanged
    | PeerChanged
    | ServiceCidrChanged
    | ChecksChanged
    | AddressesChanged
    | ListeningChanged
    | ApiServerReached
    | DevicesChanged
    | PodsBypass
    | NetworkNamespacesChanged
    | EndpointsFull
    | Synced
    | Invalid
)
