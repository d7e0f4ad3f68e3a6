"""The state of the cluster and of this node's network at one moment: the input of `plan`."""

import dataclasses
from collections.abc import Mapping

from ebpfproxy.model.address import Address, Family, Network, Protocol
from ebpfproxy.model.device import Device
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.namespace import Namespace
from ebpfproxy.model.node import Node, PeerNode
from ebpfproxy.model.node_check import NodeCheck
from ebpfproxy.model.pod import Pod
from ebpfproxy.model.service import NamespacedName, Service, ServicePortName

Listening = Mapping[tuple[Protocol, int], frozenset[Address]]
"""See `ClusterState.listening`."""


Full = Mapping[tuple[ServicePortName, Family], frozenset[bytes]]
"""See `ClusterState.full`. An endpoint is its address and port, packed as in `PlannedEndpoints.targets`."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterState:
    """The state when it is made. The mappings may be views of the tracker's, which later events change.

    - `slices`: by Service. A Service without EndpointSlices has no entry. EndpointSlices of a Service that
      does not (yet) exist are kept.
    - `node`: the Node object of this node, None until it has been read.
    - `local_networks`: the kernel's local routing table, which lists what this node delivers to itself. Most
      entries are single addresses; some are networks such as 127.0.0.0/8.
    - `devices`: all network devices of this node, sorted by ifindex.
    - `pods`: those of this node by name. Empty unless host ports are served or annotations are read.
    - `bypassing`: the ifindexes of devices whose pods reach Services through no program of ebpfproxy.
      Loopback is one of them if packets of the node itself reach Services by the packet path.
    - `peers`: all Nodes by name, this node's included. Empty unless direct server return is enabled, or
      this machine is an edge.
    - `service_cidrs`: the networks of ClusterIPs. Empty if unknown, or for an edge.
    - `down`: the failed checks of nodes. Empty unless this machine is an edge.
    - `node_addresses`: all addresses of `peers`.
    - `listening`: where programs in the network namespace of this node listen or receive datagrams: by
      protocol and port, the addresses. The unspecified address of a family means all addresses of it.
    - `namespaces`: the network namespaces that may be those of pods, by cookie. Empty unless the mode needs
      them.
    - `opted_out`: those of `pods` that the socket path must not serve, by their annotation or that of their
      Namespace.
    - `api_servers`: addresses and TCP ports at which the agent has reached the API server.
    - `full`: by ServicePort, the endpoints that get no new connections for now, since they have their share
      (`plan.rebalancing`).
    """

    services: Mapping[NamespacedName, Service]
    slices: Mapping[NamespacedName, tuple[EndpointSlice, ...]]
    node: Node | None = None
    local_networks: frozenset[Network] = frozenset()
    devices: tuple[Device, ...] = ()
    bypassing: frozenset[int] = frozenset()
    pods: Mapping[NamespacedName, Pod] = dataclasses.field(default_factory=dict)
    peers: Mapping[str, PeerNode] = dataclasses.field(default_factory=dict)
    down: frozenset[NodeCheck] = frozenset()
    service_cidrs: frozenset[Network] = frozenset()
    node_addresses: frozenset[Address] = frozenset()
    listening: Listening = dataclasses.field(default_factory=dict)
    api_servers: frozenset[tuple[Address, int]] = frozenset()
    namespaces: tuple[Namespace, ...] = ()
    opted_out: frozenset[Pod] = frozenset()
    full: Full = dataclasses.field(default_factory=dict)

    def slices_of(self, service: NamespacedName) -> tuple[EndpointSlice, ...]:
        """Return the EndpointSlices of `service`; empty if it has none."""
        return self.slices.get(service, ())
