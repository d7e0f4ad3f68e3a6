"""The kinds of objects that the agent lists and watches, with their paths and selectors.

kube-proxy's selectors are in kubernetes, cmd/kube-proxy/app/server.go, Run.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ebpfproxy.api.event import (
    ENDPOINT_SLICE,
    NAMESPACE,
    NODE,
    PEER_NODE,
    POD,
    SERVICE,
    SERVICE_CIDR,
    Event,
    NamespaceChanged,
    NodeChanged,
    PeerChanged,
    PodChanged,
    ServiceChanged,
    ServiceCidrChanged,
    SliceChanged,
)
from ebpfproxy.api.fields import SOCKET_LB
from ebpfproxy.api.parse import (
    parse_namespace,
    parse_node,
    parse_peer,
    parse_pod,
    parse_service,
    parse_service_cidr,
    parse_slice,
)
from ebpfproxy.model.service import NamespacedName

_SERVICES = {"labelSelector": "!service.kubernetes.io/service-proxy-name"}
_WITH_CLUSTER_IP = {"fieldSelector": "spec.clusterIP!=None"}
_OPT_OUT = f"annotations {SOCKET_LB} need list and watch for {{}} in the ClusterRole"
_SLICES = {"labelSelector": "!service.kubernetes.io/headless"}


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object with its path, its selector and its parser.

    `narrowing`: a further selector. A server that rejects it sends more objects, which `parse`
    ignores.

    `optional`: a server may not have the kind, or forbid it; `hint` says what is lacking then.

    `absent` is reported if the first list is empty. Every empty list is logged with `hint` if there is an
    `absent`.
    """

    kind: str
    path: str
    query: Mapping[str, str]
    parse: Callable[[Any], Event]
    deleted: Callable[[NamespacedName], Event]
    absent: Event | None = None
    hint: str = ""
    optional: bool = False
    narrowing: Mapping[str, str] = dataclasses.field(default_factory=dict)


def services() -> Resource:
    """The Services of this proxy. Kubernetes before 1.31 also sends headless ones (kubernetes/kubernetes
    #123905)."""
    return Resource(
        SERVICE,
        "/api/v1/services",
        _SERVICES,
        parse_service,
        lambda name: ServiceChanged(name, None),
        narrowing=_WITH_CLUSTER_IP,
    )


def endpoint_slices() -> Resource:
    path = "/apis/discovery.k8s.io/v1/endpointslices"
    return Resource(ENDPOINT_SLICE, path, _SLICES, parse_slice, lambda name: SliceChanged(name, None))


def pods_of(node: str, *, optional: bool) -> Resource:
    """The pods on a node, for host ports and annotations. `optional`: only for annotations."""
    return Resource(
        POD,
        "/api/v1/pods",
        {"fieldSelector": f"spec.nodeName={node}"},
        parse_pod,
        lambda name: PodChanged(name, None),
        hint=_OPT_OUT.format("pods"),
        optional=optional,
    )


def namespaces() -> Resource:
    """All Namespaces, for their annotation about the socket path."""
    return Resource(
        NAMESPACE,
        "/api/v1/namespaces",
        {},
        parse_namespace,
        lambda name: NamespaceChanged(name.name, None),
        hint=_OPT_OUT.format("namespaces"),
        optional=True,
    )


def peer_nodes() -> Resource:
    """All Nodes, for direct server return and edges."""
    return Resource(PEER_NODE, "/api/v1/nodes", {}, parse_peer, lambda name: PeerChanged(name.name, None))


def service_cidrs() -> Resource:
    """The networks of ClusterIPs (KEP-1880), since Kubernetes 1.33."""
    hint = (
        "connections to ClusterIPs that no Service has are not rejected (mode ebpf) or dropped (mode "
        "nftables); this needs Kubernetes 1.33, and list and watch for servicecidrs in the ClusterRole"
    )
    path = "/apis/networking.k8s.io/v1/servicecidrs"
    return Resource(
        SERVICE_CIDR,
        path,
        {},
        parse_service_cidr,
        lambda name: ServiceCidrChanged(name.name, ()),
        hint=hint,
        optional=True,
    )


def own_node(name: str) -> Resource:
    selector, deleted = {"fieldSelector": f"metadata.name={name}"}, NodeChanged(None)
    hint = (
        "give the name of this node's Node with --hostname-override; without it no endpoint counts as local"
    )
    return Resource(NODE, "/api/v1/nodes", selector, parse_node, lambda name: deleted, deleted, hint)
