"""The values that a plan is made of: neutral about backends, complete about Kubernetes."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, Network, Protocol, format_endpoint
from ebpfproxy.model.service import ServicePortName


class Frontend(NamedTuple):
    """What a client dials. A NodePort has the unspecified address of its family: any local address."""

    address: Address
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        return f"{format_endpoint(self.address, self.port)}/{self.protocol.name}"


class FrontendKind(enum.Enum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    EXTERNAL_IP = "ExternalIP"
    LOAD_BALANCER = "LoadBalancer"


PlanKey = tuple[ServicePortName, Family]
"""What identifies a `ServicePortPlan`: a port of a Service is planned once for each of its families."""


class Scope(enum.Enum):
    """Which list of endpoints a new connection may use: that of policy Cluster, or that of Local."""

    CLUSTER = "cluster"
    LOCAL = "local"


class NoEndpointAction(enum.Enum):
    """What a new connection gets where its scope has no endpoint."""

    REJECT = "reject"
    DROP = "drop"


class PolicyResult(NamedTuple):
    """What happens to a new connection from one class of sources."""

    scope: Scope
    masquerade: bool


class FrontendPlan(NamedTuple):
    """One frontend, for the three classes of sources: pods of this node, the node itself, all others.

    A connection of an endpoint to itself (hairpin) is masqueraded whatever `masquerade` says.
    `source_ranges` are this family's; where `restricted`, a source outside them is dropped, and the
    node itself is admitted only where `node_admitted`.
    """

    frontend: Frontend
    kind: FrontendKind
    pod: PolicyResult
    node: PolicyResult
    outside: PolicyResult
    restricted: bool = False
    source_ranges: tuple[Network, ...] = ()
    node_admitted: bool = True


class PlannedEndpoint(NamedTuple):
    """An endpoint of a ServicePort.

    `cluster` and `local`: whether new connections of that scope may use it. One that is in neither is
    listed as long as it serves, since established UDP flows to it may continue (kube-proxy's conntrack
    reconciler keeps flows to every serving endpoint, pkg/proxy/conntrack/cleanup.go).
    `on_node`: whether it runs on this node; None where the slice does not say on which node it runs.
    """

    address: Address
    port: int
    cluster: bool
    local: bool
    on_node: bool | None


class LocalTraffic(NamedTuple):
    """What identifies the packets of pods: where they come from, or the device that they come
    in by; one of the two is set. `prefix`: `interface` is only how the device's name begins.
    """

    network: Network | None = None
    interface: str = ""
    prefix: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ServicePortPlan:
    """One port of one Service in one family.

    `frontends` in the order ClusterIP, ExternalIP, LoadBalancer, NodePort; `endpoints` sorted by
    address and port, without duplicates. `no_endpoint_action` is REJECT where no endpoint could be used
    anywhere, DROP where only this node's policy leaves none (a load balancer shall see silence then,
    not a rejection). `affinity_timeout` in seconds, 0 for none. `local_traffic` is None where a backend
    knows the devices of pods by itself (`DetectLocal.DEVICES`), or without local traffic detection;
    then no result differs between `pod` and the others. `health_check_node_port`: what load balancers
    ask, 0 for none. `terse`: when this was planned the cluster was `large`, so what is there for readers only
    may be left out; a plan that nothing else changes stays as it is.
    """

    name: ServicePortName
    family: Family
    frontends: tuple[FrontendPlan, ...]
    endpoints: tuple[PlannedEndpoint, ...]
    no_endpoint_action: NoEndpointAction
    affinity_timeout: int = 0
    local_traffic: LocalTraffic | None = None
    health_check_node_port: int = 0
    terse: bool = False

    @property
    def key(self) -> PlanKey:
        return self.name, self.family


class DeviceRole(enum.Enum):
    """What a device leads to, and so whose packets come in by it."""

    UPLINK = "uplink"  # the node's network: everybody outside
    TUNNEL = "tunnel"  # other nodes and their pods
    POD = "pod"  # a pod of this node
    LOOPBACK = "loopback"  # the node itself


class DevicePlan(NamedTuple):
    """A device that packets have to be looked at on.

    `layer3`: they begin with the IP header there. `v4` and `v6`: what is masqueraded there gets; None
    where this node has no such address. `peer_elsewhere`: the device is one end of a pair, whose other end
    is in a pod's network namespace.
    """

    ifindex: int
    name: str
    role: DeviceRole
    layer3: bool
    v4: Address | None
    v6: Address | None
    peer_elsewhere: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class NodePlan:
    """What all Services share on this node: where NodePorts are answered, where packets come and go.

    `local_networks` is the kernel's local table; `node_port_networks` the part of it on which
    NodePorts answer. Both families; loopback is in the latter only where localhost NodePorts are on.
    `node_ports_everywhere`: in which families no option restricts them to some addresses; loopback does
    not count here. `devices` sorted by ifindex. `local_traffic` as in `ServicePortPlan`; a family where that
    is None is missing.
    """

    local_networks: frozenset[Network] = frozenset()
    node_port_networks: frozenset[Network] = frozenset()
    devices: tuple[DevicePlan, ...] = ()
    node_ports_everywhere: frozenset[Family] = frozenset(Family)
    local_traffic: Mapping[Family, LocalTraffic] = dataclasses.field(default_factory=dict)


class SocketLb(enum.Enum):
    """Whose sockets are sent to an endpoint when they connect; all others' packets are translated."""

    OFF = "off"
    HOST = "host"  # the node's own
    ON = "on"  # and its pods'


class DetectLocal(enum.Enum):
    """How the packets of pods are distinguished from others: kube-proxy's --detect-local-mode, and DEVICES:
    by the role of the device that they come in by, whatever its name, as the eBPF backend does.

    Pods are all of the cluster with CLUSTER_CIDR, those of this node with the others.
    """

    DEVICES = "Devices"
    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"


@dataclasses.dataclass(frozen=True, slots=True)
class PlanContext:
    """What plan needs to know beside the cluster's objects.

    `node_port_cidrs` empty means every local address, unless `node_port_primary`. `node_name` as endpoints
    name it.
    `bind_address`: kube-proxy's, None where it is no address in particular; of its family, it is the node's
    own address whatever the Node says. `redirect`: flows of clients outside skip the node's stack, and so do
    replies of pods. `device_patterns` as of the shell; empty means that devices are
    found by what they are.
    `cluster_cidrs`: for `DetectLocal.CLUSTER_CIDR`; the first of a family counts. `pod_interface`, a name
    or how names begin: for the two modes that go by it.
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
