"""Parse JSON of the Kubernetes API into values of `ebpfproxy.model` and events.

Only this module, `fields` and `parts` know the API's field names. An invalid part of a valid object (an
address, a port) is left out and reported as a complaint. An object that cannot be served is an `Invalid`.
The functions that parse an object never raise, whatever bytes they get.
"""

import json
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw

from ebpfproxy.api import fields, parts
from ebpfproxy.api.balancing import balancing, rebalance, removed_endpoints
from ebpfproxy.api.event import (
    ENDPOINT_SLICE,
    NAMESPACE,
    NODE,
    POD,
    SERVICE,
    SERVICE_CIDR,
    Event,
    Invalid,
    NamespaceChanged,
    NodeChanged,
    PeerChanged,
    PodChanged,
    ServiceChanged,
    ServiceCidrChanged,
    SliceChanged,
    Unserved,
)
from ebpfproxy.api.parts import FAMILIES, JUNK, NAME, Complaints, shorten, usable_name
from ebpfproxy.api.pods import namespace_changed, pod_changed
from ebpfproxy.errors import InvalidObject, SourceError
from ebpfproxy.model.address import Address
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node, PeerNode
from ebpfproxy.model.service import NamespacedName, Service, ServiceType

UNNAMED = "(unnamed)"
"""The name in an Invalid whose object has no readable name."""

MANIFEST = "manifest"
"""The kind in an Invalid about an object of a kind that a proxy does not read."""

_MAX_LIST_DEPTH = 8
_PORT_DIGITS, _MAX_PORT = 5, 65535
_API_VERSIONS = {
    SERVICE: "v1",
    NODE: "v1",
    NAMESPACE: "v1",
    POD: "v1",
    ENDPOINT_SLICE: "discovery.k8s.io/v1",
    SERVICE_CIDR: "networking.k8s.io/v1",
}
_LISTS = frozenset({"List", *(f"{kind}List" for kind in _API_VERSIONS)})
_WATCH_TYPES = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"})


# --- Lists and watches ---


class ListPage(NamedTuple):
    """One page of a list. `items` are not decoded yet, so that an invalid item does not fail the page.

    `continue_token` is "" on the last page. `remaining` is the server's estimate, None if unknown.
    """

    items: tuple[bytes | Raw, ...]
    resource_version: str
    continue_token: str
    remaining: int | None


class WatchEvent(NamedTuple):
    """One event of a watch. `type` is ADDED, MODIFIED, DELETED, BOOKMARK or ERROR.

    `resource_version` is that of the object, "" if it has none. `code` and `message` are those of the Status
    in an ERROR event, else 0 and "". `initial_events_end` marks the bookmark that ends the initial events of
    a streaming list (KEP-3157).
    """

    type: str
    object: bytes | Raw
    resource_version: str
    code: int
    message: str
    initial_events_end: bool


def parse_list(body: bytes) -> ListPage:
    """Parse a page of a list. `items` may be null, as Go writes an empty list, but not missing.

    Raises SourceError for an invalid envelope. As an empty list, it would delete every known object.
    """
    try:
        page = fields.LIST_DECODER.decode(body)
    except JUNK as error:
        page = _decode_list_slowly(body, error)
    if not page.metadata.resource_version:
        raise SourceError("cannot read the list: it has no resourceVersion")
    head = page.metadata
    items = tuple(page.items or ())
    return ListPage(items, head.resource_version or "", head.continue_token or "", head.remaining)


def _decode_list_slowly(body: bytes, error: Exception) -> fields.List:
    r"""Parse a page that the fast decoder rejects, such as one with the lone surrogate escape "\ud800"."""
    try:
        page = json.loads(body)
        items = page["items"]
        if not isinstance(items, list):
            raise TypeError("items is not a list")
        head = msgspec.convert(page["metadata"], fields.ListMetadata)
        return fields.List(metadata=head, items=[Raw(json.dumps(item).encode()) for item in items])
    except (*JUNK, KeyError, TypeError):
        raise SourceError(f"cannot read the list: {shorten(str(error))}") from None


def parse_watch_event(line: bytes) -> WatchEvent:
    """Parse one line of a watch. An invalid object in a valid event gets the resource version "".

    Raises SourceError if the line is not a watch event.
    """
    try:
        event = fields.WATCH_EVENT_DECODER.decode(line)
    except JUNK as error:
        raise SourceError(f"cannot read a watch event: {shorten(str(error))}") from None
    if event.type not in _WATCH_TYPES:
        raise SourceError(f"cannot read a watch event: unknown type {shorten(repr(event.type))}")
    try:
        content = fields.WATCH_OBJECT_DECODER.decode(event.object)
    except JUNK:
        content = fields.WatchObject()
    head = content.metadata or fields.ListMetadata()
    failed = event.type == "ERROR"
    annotations = head.annotations
    return WatchEvent(
        type=event.type,
        object=event.object,
        resource_version=head.resource_version or "",
        code=(content.code or 0) if failed else 0,
        message=(content.message or content.reason or "") if failed else "",
        initial_events_end=annotations is not None and annotations.initial_events_end == "true",
    )


def parse_status_reason(body: bytes) -> tuple[int, str]:
    """Return code and message of a Status, the body of a failed request; (0, "") if it is not a Status."""
    try:
        status = fields.WATCH_OBJECT_DECODER.decode(body)
    except JUNK:
        return 0, ""
    return status.code or 0, status.message or status.reason or ""


# --- Objects ---


class ObjectHead(NamedTuple):
    """Identity and version of an object. `name` is None if unusable, `resource_version` "" if missing."""

    name: NamespacedName | None
    resource_version: str


def object_head(raw: bytes | Raw) -> ObjectHead:
    """Return identity and version of an object, whatever else it contains. Never raises.

    An object without a namespace, such as a Node, gets the namespace "default".
    """
    try:
        head = fields.OBJECT_HEAD_DECODER.decode(raw).metadata
    except JUNK:
        return ObjectHead(None, "")
    if head is None:
        return ObjectHead(None, "")
    version = head.resource_version if isinstance(head.resource_version, str) else ""
    try:
        return ObjectHead(usable_name(head), version)
    except InvalidObject:
        return ObjectHead(None, version)


def parse_service(raw: bytes | Raw) -> ServiceChanged | Invalid:
    """Parse a core/v1 Service. Never raises.

    The event's `service` is None for headless and ExternalName Services and those of another proxy.
    """
    try:
        return _service(fields.SERVICE_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(SERVICE, raw, error)


def parse_slice(raw: bytes | Raw) -> SliceChanged | Invalid:
    """Parse a discovery.k8s.io/v1 EndpointSlice. Never raises.

    The event's `slice` is None for slices without a Service, with FQDNs, or of another proxy.
    """
    try:
        return _slice(fields.SLICE_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(ENDPOINT_SLICE, raw, error)


def parse_node(raw: bytes | Raw) -> NodeChanged | Invalid:
    """Parse a core/v1 Node of any name. Never raises."""
    try:
        return _node(fields.NODE_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(NODE, raw, error)


def parse_peer(raw: bytes | Raw) -> PeerChanged | Invalid:
    """Parse a core/v1 Node of any name as `PeerNode`. Never raises."""
    try:
        return _peer(fields.NODE_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(NODE, raw, error)


def parse_pod(raw: bytes | Raw) -> PodChanged | Invalid:
    """Parse a core/v1 Pod of any node. Never raises."""
    try:
        return pod_changed(fields.POD_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(POD, raw, error)


def parse_namespace(raw: bytes | Raw) -> NamespaceChanged | Invalid:
    """Parse a core/v1 Namespace. Never raises."""
    try:
        return namespace_changed(fields.NAMESPACE_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(NAMESPACE, raw, error)


def parse_service_cidr(raw: bytes | Raw) -> ServiceCidrChanged | Invalid:
    """Parse a networking.k8s.io/v1 ServiceCIDR. Never raises."""
    try:
        return _service_cidr(fields.SERVICE_CIDR_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(SERVICE_CIDR, raw, error)


def parse_manifest_object(raw: bytes | Raw, node_name: str) -> list[Event]:
    """Parse an object of a manifest by its kind; a list yields the events of all its items. Never raises.

    A Node yields a `PeerChanged`; that with the name `node_name` also a `NodeChanged`. A kind that a proxy
    does not read yields an Invalid of kind `MANIFEST`.
    """
    return _manifest(raw, node_name, "", 0)


def _manifest(raw: bytes | Raw, node_name: str, kind: str, depth: int) -> list[Event]:
    """`kind` is the kind of an object without a `kind` field, such as an item of a ServiceList."""
    try:
        head = fields.MANIFEST_DECODER.decode(raw)
    except JUNK as error:
        return [_invalid(MANIFEST, raw, error)]
    kind = head.kind or kind
    if kind in _LISTS:
        if depth >= _MAX_LIST_DEPTH:
            return [Invalid(MANIFEST, UNNAMED, "lists within lists are nested too deep")]
        item_kind = kind.removesuffix("List")
        return [
            event for item in head.items or () for event in _manifest(item, node_name, item_kind, depth + 1)
        ]
    if kind not in _API_VERSIONS or head.api_version not in (None, "", _API_VERSIONS[kind]):
        shown = f"{head.api_version} {kind}" if head.api_version else kind or "none"
        return [
            _invalid(MANIFEST, raw, InvalidObject(f"kind {shorten(shown)} is not used by a service proxy"))
        ]
    if kind == SERVICE:
        return [parse_service(raw)]
    if kind == ENDPOINT_SLICE:
        return [parse_slice(raw)]
    if kind == POD:
        return _pod_of_node(raw, node_name)
    if kind == NAMESPACE:
        return [parse_namespace(raw)]
    if kind == SERVICE_CIDR:
        return [parse_service_cidr(raw)]
    peer = parse_peer(raw)
    is_own = isinstance(peer, PeerChanged) and peer.name == node_name
    return [parse_node(raw), peer] if is_own else [peer]


def _pod_of_node(raw: bytes | Raw, node_name: str) -> list[Event]:
    try:
        node = fields.POD_DECODER.decode(raw).spec.node_name
    except JUNK:
        node = node_name  # so that the error is reported
    return [parse_pod(raw)] if node == node_name else []


def _service(decoded: fields.Service) -> ServiceChanged:
    name, spec, complaints = usable_name(decoded.metadata), decoded.spec, Complaints()
    if unserved := _unserved(decoded):
        return ServiceChanged(name, None, unserved=unserved)
    kind = parts.choice(ServiceType, spec.type, ServiceType.CLUSTER_IP, "type", complaints)
    service = Service(
        name=name,
        ports=parts.service_ports(spec.ports or (), complaints),
        cluster_ips=parts.cluster_ips(spec, complaints),
        external_ips=parts.addresses(spec.external_ips or (), "externalIPs", complaints),
        load_balancer_ips=parts.load_balancer_ips(decoded.status, complaints),
        source_ranges=parts.source_ranges(spec.load_balancer_source_ranges or (), complaints),
        type=kind,
        internal_policy=parts.policy(spec.internal_traffic_policy, "internalTrafficPolicy", complaints),
        external_policy=parts.policy(spec.external_traffic_policy, "externalTrafficPolicy", complaints),
        affinity_timeout=parts.affinity_timeout(spec, complaints),
        health_check_node_port=parts.node_port(
            spec.health_check_node_port, "healthCheckNodePort", complaints
        ),
        balancing=balancing(decoded.metadata.annotations, complaints),
        removed_endpoints=removed_endpoints(decoded.metadata.annotations, complaints),
        rebalance=rebalance(decoded.metadata.annotations, complaints),
    )
    may_be_reported = complaints.excess or service.external_ips or service.load_balancer_ips
    uid = (decoded.metadata.uid or "") if may_be_reported else ""
    return ServiceChanged(name, service, complaints.reported(), excess=complaints.excess, uid=uid)


def _unserved(decoded: fields.Service) -> Unserved | None:
    spec = decoded.spec
    if spec.type == "ExternalName":
        return Unserved.EXTERNAL_NAME
    if spec.cluster_ip == "None":
        return Unserved.HEADLESS
    if not spec.cluster_ip:
        return Unserved.NO_CLUSTER_IP
    labels = decoded.metadata.labels
    return Unserved.OTHER_PROXY if labels and labels.proxy_name is not UNSET else None


def _slice(decoded: fields.EndpointSlice) -> SliceChanged:
    head = decoded.metadata
    name, complaints = usable_name(head), Complaints()
    labels = head.labels
    service = labels.service if labels else None
    is_headless = labels is not None and labels.headless is not UNSET
    if not service or decoded.address_type == "FQDN" or is_headless:
        return SliceChanged(name, None)
    if decoded.address_type not in FAMILIES:
        raise InvalidObject(f"addressType {shorten(repr(decoded.address_type))} is unknown")
    if not NAME.fullmatch(service):
        shown = shorten(repr(service))
        raise InvalidObject(f"the label kubernetes.io/service-name is not a usable name: {shown}")
    family = FAMILIES[decoded.address_type]
    trigger = head.annotations.trigger_time if head.annotations else None
    result = EndpointSlice(
        name=name,
        service=NamespacedName(name.namespace, service),
        family=family,
        ports=parts.slice_ports(decoded.ports or (), complaints),
        endpoints=parts.endpoints(decoded.endpoints or (), family, name.namespace, complaints),
        trigger_time=parts.moment(trigger) if trigger else None,
    )
    return SliceChanged(name, result, complaints.reported())


def _node(decoded: fields.Node) -> NodeChanged:
    head = decoded.metadata
    spec, status = decoded.spec or fields.NodeSpec(), decoded.status or fields.NodeStatus()
    leaving = any(taint and taint.key == "ToBeDeletedByClusterAutoscaler" for taint in spec.taints or ())
    node = Node(
        name=_cluster_name(head),
        zone=(head.labels.zone if head.labels else None) or "",
        eligible=head.deletion_timestamp is None and not leaving,
        addresses=_addresses(status, "InternalIP"),
        external_addresses=_addresses(status, "ExternalIP"),
        pod_cidrs=parts.networks(spec.pod_cidrs or [spec.pod_cidr], "podCIDRs", Complaints()),
        dsr_port=_dsr_port(head),
    )
    return NodeChanged(node)


def _peer(decoded: fields.Node) -> PeerChanged:
    head, status = decoded.metadata, decoded.status or fields.NodeStatus()
    internal = _addresses(status, "InternalIP")
    others = {each.type for each in status.addresses or () if each and each.type} - {"InternalIP"}
    further = tuple(address for of_type in sorted(others) for address in _addresses(status, of_type))
    return PeerChanged(_cluster_name(head), PeerNode(internal, _dsr_port(head), further))


def _service_cidr(decoded: fields.ServiceCIDR) -> ServiceCidrChanged:
    spec, complaints = decoded.spec or fields.ServiceCIDRSpec(), Complaints()
    networks = parts.networks(spec.cidrs or (), "spec.cidrs", complaints)
    return ServiceCidrChanged(_cluster_name(decoded.metadata), networks, complaints.reported())


def _cluster_name(head: fields.Metadata) -> str:
    if not head.name or not NAME.fullmatch(head.name):
        raise InvalidObject(f"metadata.name is not a usable name: {shorten(repr(head.name))}")
    return head.name


def _dsr_port(head: fields.Metadata) -> int:
    """Return the port that a Node announces. Text that is no port, which no agent writes, counts as none."""
    text = (head.annotations.dsr_port if head.annotations else None) or ""
    port = int(text) if text.isascii() and text.isdigit() and len(text) <= _PORT_DIGITS else 0
    return port if port <= _MAX_PORT else 0


def _addresses(status: fields.NodeStatus, of_type: str) -> tuple[Address, ...]:
    texts = (entry.address for entry in status.addresses or () if entry and entry.type == of_type)
    return parts.addresses(texts, "status.addresses", Complaints())


def _invalid(kind: str, raw: bytes | Raw, error: Exception) -> Invalid:
    """Return an Invalid with the object's name if it is readable, else UNNAMED.

    Some kinds have no namespace. A manifest object of another kind may have none.
    """
    try:
        head = fields.OBJECT_HEAD_DECODER.decode(raw).metadata or fields.HeadMetadata()
        words = [
            head.namespace or ("" if kind in (NODE, SERVICE_CIDR, MANIFEST) else "default"),
            head.name or "",
        ]
        usable = all(NAME.fullmatch(word) for word in words if word) and words[1]
        name = "/".join(word for word in words if word) if usable else UNNAMED
    except JUNK:
        name = UNNAMED
    return Invalid(kind, name, shorten(fields.explain(error, f"a {kind}")) or type(error).__name__)
