"""The types of a plan: `ServicePortPlan` for Services, `NodePlan` for this node, `PlanContext` for options.

A plan contains every rule of Kubernetes, and nothing that is specific to a backend.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, Network, Protocol, format_endpoint
from ebpfproxy.model.balancing import Algorithm, Forwarding
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.balancing import DEFAULT, PlannedBalancing
from ebpfproxy.plan.planned_endpoints import PlannedEndpoint as PlannedEndpoint
from ebpfproxy.plan.planned_endpoints import PlannedEndpoints as PlannedEndpoints


class Frontend(NamedTuple):
    """The address, port and protocol to which a client connects.

    A NodePort has the unspecified address of its family: any local address that accepts NodePorts.
    """

    address: Address
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        return f"{format_endpoint(self.address, self.port)}/{self.protocol.name}"


class FrontendKind(enum.Enum):
    """The field of the Service that the frontend comes from."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    EXTERNAL_IP = "ExternalIP"
    LOAD_BALANCER = "LoadBalancer"

    __hash__ = object.__hash__  # faster than Enum.__hash__, which is written in Python


PlanKey = tuple[ServicePortName, Family]
"""The identity of a `ServicePortPlan`: each ServicePort has one plan per family."""


class Scope(enum.Enum):
    """Which endpoints a new connection may use: those of traffic policy Cluster, or those of Local."""

    CLUSTER = "cluster"
    LOCAL = "local"


class NoEndpointAction(enum.Enum):
    """What happens to a new connection if its scope has no endpoint."""

    REJECT = "reject"
    DROP = "drop"


class PolicyResult(NamedTuple):
    """What happens to a new connection from one class of clients."""

    scope: Scope
    masquerade: bool


class FrontendPlan(NamedTuple):
    """One frontend, with the traffic policy results for three classes of clients.

    - `pod`: pods, as local traffic detection recognizes them.
    - `node`: this node itself.
    - `outside`: all other clients.

    A connection of an endpoint to itself (hairpin) is always masqueraded. If `restricted`, packets of clients
    outside `source_ranges`, which are of this family, are dropped. The node itself is then admitted only if
    `node_admitted`.
    """

    frontend: Frontend
    kind: FrontendKind
    pod: PolicyResult
    node: PolicyResult
    outside: PolicyResult
    restricted: bool = False
    source_ranges: tuple[Network, ...] = ()
    node_admitted: bool = True


class LocalTraffic(NamedTuple):
    """What identifies the packets of pods: their source network or their ingress device.

    Either `network` or `interface` is set. If `prefix`, `interface` is the beginning of the device's name.
    """

    network: Network | None = None
    interface: str = ""
    prefix: bool = False


class PlannedRebalancing(NamedTuple):
    """See `plan.rebalancing`. `targets`: the endpoints that may get new connections, also those that do not
    get any for now because they have their share, sorted."""

    percent: int
    targets: PlannedEndpoints


@dataclasses.dataclass(frozen=True, slots=True)
class ServicePortPlan:
    """The plan of one ServicePort in one family.

    - `frontends`: in the order ClusterIP, ExternalIP, LoadBalancer, NodePort.
    - `endpoints`: sorted by address and port, without duplicates.
    - `no_endpoint_action`: REJECT if no node has a usable endpoint. DROP if only the policy excludes the
      endpoints: a load balancer then gets no answer instead of a rejection.
    - `affinity_timeout`: in seconds, 0 without session affinity.
    - `local_traffic`: what identifies packets of pods. None if the backend recognizes the devices of pods
      (`DetectLocal.DEVICES`), or without local traffic detection, where `pod` equals the other results.
    - `health_check_node_port`: 0 without one.
    - `terse`: the cluster was large (`ClusterSize.large`) at the time of planning, so text for readers, such
      as comments of rules, may be left out. A plan without other changes keeps its value.
    - `balancing`: how one of the endpoints is selected.
    - `serving`: the endpoints whose open connections continue, if those to all others are to be reset: all
      that serve, sorted. They include endpoints without weight. None: no connection is reset.
    - `rebalancing`: None if it is not requested, or not possible.
    - `key`: the identity of the plan. A field, so that all dictionaries of plans share one object.
    """

    name: ServicePortName
    family: Family
    frontends: tuple[FrontendPlan, ...]
    endpoints: PlannedEndpoints
    no_endpoint_action: NoEndpointAction
    affinity_timeout: int = 0
    local_traffic: LocalTraffic | None = None
    health_check_node_port: int = 0
    terse: bool = False
    balancing: PlannedBalancing = DEFAULT
    serving: PlannedEndpoints | None = None
    rebalancing: PlannedRebalancing | None = None
    key: PlanKey = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.name, self.family))

    def usable(self, scope: Scope) -> list[PlannedEndpoint]:
        """Return the endpoints that new connections with this scope may use."""
        return [each for each in self.endpoints if (each.local if scope is Scope.LOCAL else each.cluster)]


class DeviceRole(enum.Enum):
    """What a device leads to, and so the class of the clients whose packets enter through it."""

    UPLINK = "uplink"  # the node's network: clients outside
    TUNNEL = "tunnel"  # other nodes and their pods
    POD = "pod"  # a pod of this node
    GUEST = "guest"  # a container or VM of this machine that is no pod: a client outside
    LOOPBACK = "loopback"  # the node itself


class By(enum.Enum):
    """What the network of a `Source` contains."""

    NEXT_HOP = "next hop"  # the gateway, or the destination of a route without one
    DESTINATION = "destination"


class Source(NamedTuple):
    """The address that the kernel selects as the source of packets to a network."""

    by: By
    network: Network
    address: Address


class DevicePlan(NamedTuple):
    """A device that gets programs of the packet path.

    - `layer3`: packets begin with the IP header; there is no Ethernet header.
    - `v4`, `v6`: the addresses that masqueraded packets get, None if this node has no such address.
    - `peer_elsewhere`: the device is one end of a pair whose other end is in a pod's network namespace.
    - `bridge`: the MAC address of the bridge of which the device is a port, empty for other devices.
    - `switched`: the device is a port of another kind of switch, such as Open vSwitch.
    - `sources`: which address masqueraded packets get if it is not always `v4` or `v6`. Empty if it is. The
      longest network of a next hop applies, else that of the destination, else `v4` or `v6`.
    """

    ifindex: int
    name: str
    role: DeviceRole
    layer3: bool
    v4: Address | None
    v6: Address | None
    peer_elsewhere: bool = False
    bridge: bytes = b""
    switched: bool = False
    sources: tuple[Source, ...] = ()


class FrontendRoute(NamedTuple):
    """A route that leads packets to an on-link address of frontends to the programs of a device (`on_link`).

    `table`: the number of its routing table. `source`: the source address of the on-link route, None for the
    kernel's choice.
    """

    address: Address
    table: int
    ifindex: int
    source: Address | None


class PodNamespace(NamedTuple):
    """The network namespace of a pod.

    `v4` and `v6`: the sources of its packets to Services, None if unknown (`namespaces.source`).
    """

    cookie: int
    v4: Address | None
    v6: Address | None


@dataclasses.dataclass(frozen=True, slots=True)
class NodePlan:
    """The plan of this node: what all Services share, in both families.

    - `local_networks`: the kernel's local routing table.
    - `node_port_networks`: the part of it that accepts NodePorts. Loopback is included only if NodePorts on
      localhost are enabled.
    - `devices`: those that get programs, sorted by ifindex.
    - `node_ports_everywhere`: the families in which no option restricts NodePorts to some addresses. Whether
      loopback accepts them makes no difference.
    - `local_traffic`: as in `ServicePortPlan`. A family in which it is None is missing.
    - `service_cidrs`: the networks of ClusterIPs; empty if unknown.
    - `tunnel_sources`: the nodes and edges whose tunneled packets this node accepts (direct server return).
    - `pod_namespaces`: the network namespaces of pods whose sockets the socket path serves.
    - `lasting`: the ifindexes of pods' devices that have had programs for a ServicePort or by an
      annotation. They keep them, since connections may have begun there at any time.
    - `addresses`: those of the Node object; empty if it is unknown.
    - `foreign_networks`: addresses in them may be another machine's (`foreign_addresses`).
    - `frontend_routes`: the routes that on-link frontends need.
    - `flowtable_devices`: ifindex and name of those whose packets the flowtable of mode nftables forwards.
    """

    local_networks: frozenset[Network] = frozenset()
    node_port_networks: frozenset[Network] = frozenset()
    devices: tuple[DevicePlan, ...] = ()
    node_ports_everywhere: frozenset[Family] = frozenset(Family)
    local_traffic: Mapping[Family, LocalTraffic] = dataclasses.field(default_factory=dict)
    tunnel_sources: frozenset[Network] = frozenset()
    service_cidrs: frozenset[Network] = frozenset()
    pod_namespaces: frozenset[PodNamespace] = frozenset()
    lasting: frozenset[int] = dataclasses.field(default=frozenset(), compare=False)
    addresses: frozenset[Address] = frozenset()
    foreign_networks: frozenset[Network] = frozenset()
    frontend_routes: frozenset[FrontendRoute] = frozenset()
    flowtable_devices: tuple[tuple[int, str], ...] = ()


class SocketLb(enum.Enum):
    """Whose connections are redirected in the connect() hook. Packets of all others are translated."""

    OFF = "off"
    HOST = "host"  # sockets of the node
    ON = "on"  # sockets of the node and of its pods


class DetectLocal(enum.Enum):
    """How packets of pods are recognized: kube-proxy's --detect-local-mode, and DEVICES.

    DEVICES recognizes them by the role of their ingress device (`DeviceRole`), as the eBPF backend does. Pods
    are those of the cluster with CLUSTER_CIDR, and those of this node with the other modes.
    """

    DEVICES = "Devices"
    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


class Role(enum.Enum):
    """What the machine of the agent is for the cluster."""

    NODE = "node"
    EDGE = "edge"  # not part of the cluster: it forwards connections from outside to nodes

    __hash__ = object.__hash__


class Protection(enum.Enum):
    """Whose addresses external and load balancer IPs must not take over (`protected_addresses`)."""

    NODE = "node"  # those of this node and of the API server
    NODES = "nodes"  # also those of all other Nodes
    NONE = "none"

    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True, slots=True)
class PlanContext:
    """The options on which plans depend.

    - `node_name`: as in EndpointSlices, "" for an edge.
    - `node_port_cidrs`: empty means every local address, unless `node_port_primary`.
    - `bind_address`: kube-proxy's --bind-address, None if it is unspecified. In its family it is the node's
      primary address, whatever the Node object has.
    - `cluster_cidrs`: for `DetectLocal.CLUSTER_CIDR`. The first of each family counts.
    - `pod_interface`: a device name, or the beginning of device names, for the two modes that use it.
    - `redirect`: packets of flows from outside, and replies of pods, bypass the node's stack.
    - `device_patterns`: shell patterns of device names. Empty means that devices are found by their
      properties.
    - `flowtable_patterns`: shell patterns of the devices of the flowtable. Empty: no flowtable.
    - `host_ports`: whether the host ports of pods are served.
    - `external_ips`: whether the external IPs of Services are served.
    - `algorithm`: for Services without an annotation. None: the mode's default.
    - `slow_start`: in seconds, for Services without an annotation.
    - `dsr_port`: the UDP port of the tunnels of direct server return. 0: this node has none.
    - `direct_return`: whether Services without an annotation request direct server return.
    - `tunnel_sources`: whose tunneled packets this node accepts besides those of Nodes.
    - `sctp_unserved`: why the kernel cannot translate SCTP in this mode, "" if it can.
    - `role`: an edge has no Node, no pods and no NodePorts. It serves external and load balancer IPs only.
    - `vip_cidrs`: the networks of the addresses that an edge serves. Empty means all.
    - `forwarding`: of IPVS, for Services without an annotation. `service_forwarding`: whether annotations
      may request another one.
    - `protection`: whose addresses Services must not take over.
    - `external_networks`: the networks of external and load balancer IPs, each with the namespace whose
      Services may have them, or "*" for every namespace. Empty: all addresses.
    - `rebalance`: a percentage, for Services without an annotation.
    - `reset_removed`: whether connections to removed endpoints are reset, for Services without an annotation.
    """

    node_name: str
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    node_port_cidrs: tuple[Network, ...] = ()
    node_port_primary: bool = False
    bind_address: Address | None = None
    detect_local: DetectLocal = DetectLocal.DEVICES
    cluster_cidrs: tuple[Network, ...] = ()
    pod_interface: str = ""
    socket_lb: SocketLb = SocketLb.ON
    redirect: bool = False
    device_patterns: tuple[str, ...] = ()
    flowtable_patterns: tuple[str, ...] = ()
    algorithm: Algorithm | None = None
    slow_start: int = 0
    host_ports: bool = False
    external_ips: bool = True
    sctp_unserved: str = ""
    role: Role = Role.NODE
    vip_cidrs: tuple[Network, ...] = ()
    dsr_port: int = 0
    direct_return: bool = False
    tunnel_sources: tuple[Network, ...] = ()
    protection: Protection = Protection.NODE
    forwarding: Forwarding = Forwarding.NAT
    service_forwarding: bool = False
    external_networks: tuple[tuple[str, Network], ...] = ()
    rebalance: int = 0
    reset_removed: bool = False
