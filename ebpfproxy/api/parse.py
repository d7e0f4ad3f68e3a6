"""From the API's JSON to our values; with `fields` and `parts`, the only place that knows the API's names.

Within an otherwise good object, junk
(an address, a port) is left out and reported as a complaint; an object that cannot be served as a whole
is an `Invalid`. The functions that parse an object never raise, whatever bytes they are given.
"""

import json
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw

from ebpfproxy.api import fields, parts
from ebpfproxy.api.event import (
    ENDPOINT_SLICE,
    NODE,
    SERVICE,
    Event,
    Invalid,
    NodeChanged,
    ServiceChanged,
    SliceChanged,
)
from ebpfproxy.api.parts import FAMILIES, JUNK, NAME, Complaints, shorten, usable_name
from ebpfproxy.errors import InvalidObject, SourceError
from ebpfproxy.model.address import Address
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName, Service, ServiceType

UNNAMED = "(unnamed)"
"""The name in an Invalid whose object has no readable one."""

MANIFEST = "manifest"
"""The kind in an Invalid about an object of a kind that no proxy reads."""


_MAX_LIST_DEPTH = 8


_API_VERSIONS = {SERVICE: "v1", NODE: "v1", ENDPOINT_SLICE: "discovery.k8s.io/v1"}
_LISTS = frozenset({"List", *(f"{kind}List" for kind in _API_VERSIONS)})
_WATCH_TYPES = frozenset({"ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"})


# --- Lists and watches ---


class ListPage(NamedTuple):
    """One page of a list. `items` are not decoded yet, so that a bad one does not fail the page.

    `continue_token` is "" on the last page. `remaining` is a hint of the server, None where unknown.
    """

    items: tuple[bytes | Raw, ...]
    resource_version: str
    continue_token: str
    remaining: int | None


class WatchEvent(NamedTuple):
    """`type` is ADDED, MODIFIED, DELETED, BOOKMARK or ERROR.

    `resource_version` is the object's, "" where it has none; `code` and `message` are the Status's
    of an ERROR, else 0 and "". `initial_events_end` marks the bookmark that ends the initial events
    of a streaming list (KEP-3157).
    """

    type: str
    object: bytes | Raw
    resource_version: str
    code: int
    message: str
    initial_events_end: bool


def parse_list(body: bytes) -> ListPage:
    """Read a page of a list. `items` may be null, as Go writes an empty list, but not missing.

    Raises SourceError where the envelope is none: an empty list that is not really one would delete
    every object we know.
    """
    try:
        page = fields.LIST_DECODER.decode(body)
    except JUNK as error:
        page = _decode_list_slowly(body, error)
    if not page.metadata.resource_version:
        raise SourceError("The list has no resourceVersion")
    head = page.metadata
    items = tuple(page.items or ())
    return ListPage(items, head.resource_version or "", head.continue_token or "", head.remaining)


def _decode_list_slowly(body: bytes, error: Exception) -> fields.List:
    r"""Read a page in which one item is not even proper JSON text: an escape such as "\ud800" alone."""
    try:
        page = json.loads(body)
        items = page["items"]
        if not isinstance(items, list):
            raise TypeError("items is no list")
        head = msgspec.convert(page["metadata"], fields.ListMetadata)
        return fields.List(metadata=head, items=[Raw(json.dumps(item).encode()) for item in items])
    except (*JUNK, KeyError, TypeError):
        raise SourceError(f"The list could not be read: {shorten(str(error))}") from None


def parse_watch_event(line: bytes) -> WatchEvent:
    """Read one line of a watch. A junk object within a good event has the resource version "".

    Raises SourceError where the line is no watch event.
    """
    try:
        event = fields.WATCH_EVENT_DECODER.decode(line)
    except JUNK as error:
        raise SourceError(f"The watch sent what is no event: {shorten(str(error))}") from None
    if event.type not in _WATCH_TYPES:
        raise SourceError(f"The watch sent an event of type {shorten(repr(event.type))}")
    try:
        content = fields.WATCH_OBJECT_DECODER.decode(event.object)
    except JUNK:
        content = fields.WatchObject()
    head = content.metadata or fields.ListMetadata()
    failed = event.type == "ERROR"
    notes = head.annotations
    return WatchEvent(
        type=event.type,
        object=event.object,
        resource_version=head.resource_version or "",
        code=(content.code or 0) if failed else 0,
        message=(content.message or content.reason or "") if failed else "",
        initial_events_end=notes is not None and notes.initial_events_end == "true",
    )


def parse_status_reason(body: bytes) -> tuple[int, str]:
    """Code and message of a Status, the body of a failed request; (0, "") where it is none."""
    try:
        status = fields.WATCH_OBJECT_DECODER.decode(body)
    except JUNK:
        return 0, ""
    return status.code or 0, status.message or status.reason or ""


# --- Objects ---


class ObjectHead(NamedTuple):
    """`name` is None where there is no usable one, `resource_version` "" where there is none."""

    name: NamespacedName | None
    resource_version: str


def object_head(raw: bytes | Raw) -> ObjectHead:
    """The identity and version of an object, whatever else is in it. Never raises.

    The name of an object without a namespace, as a Node, has the namespace "default".
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
    """Read a core/v1 Service. Headless, ExternalName and other proxies' Services are None. Never raises."""
    try:
        return _service(fields.SERVICE_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(SERVICE, raw, error)


def parse_slice(raw: bytes | Raw) -> SliceChanged | Invalid:
    """Read a discovery.k8s.io/v1 EndpointSlice. One of no Service, or of FQDNs, is None. Never raises."""
    try:
        return _slice(fields.SLICE_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(ENDPOINT_SLICE, raw, error)


def parse_node(raw: bytes | Raw) -> NodeChanged | Invalid:
    """Read a core/v1 Node, whosever it is. Never raises."""
    try:
        return _node(fields.NODE_DECODER.decode(raw))
    except (*JUNK, InvalidObject) as error:
        return _invalid(NODE, raw, error)


def parse_manifest_object(raw: bytes | Raw, node_name: str) -> list[Event]:
    """Read an object of a manifest by its kind; a list gives the events of all its items. Never raises.

    Of Nodes, only the one of name `node_name` counts; another gives no event. A kind that no proxy
    reads gives an Invalid of kind `MANIFEST`.
    """
    return _manifest(raw, node_name, "", 0)


def _manifest(raw: bytes | Raw, node_name: str, kind: str, depth: int) -> list[Event]:
    """`kind` is what an item is whose own kind is missing, as in a ServiceList."""
    try:
        head = fields.MANIFEST_DECODER.decode(raw)
    except JUNK as error:
        return [_invalid(MANIFEST, raw, error)]
    kind = head.kind or kind
    if kind in _LISTS:
        if depth >= _MAX_LIST_DEPTH:
            return [Invalid(MANIFEST, UNNAMED, "lists within lists are nested too deep")]
        of = kind.removesuffix("List")
        return [event for item in head.items or () for event in _manifest(item, node_name, of, depth + 1)]
    if kind not in _API_VERSIONS or head.api_version not in (None, "", _API_VERSIONS[kind]):
        what = f"{head.api_version} {kind}" if head.api_version else kind or "none"
        return [_invalid(MANIFEST, raw, InvalidObject(f"kind {shorten(what)} is not one that a proxy reads"))]
    if kind == SERVICE:
        return [parse_service(raw)]
    if kind == ENDPOINT_SLICE:
        return [parse_slice(raw)]
    node = parse_node(raw)
    ours = isinstance(node, Invalid) or (node.node is not None and node.node.name == node_name)
    return [node] if ours else []


def _service(decoded: fields.Service) -> ServiceChanged:
    name, spec, complaints = usable_name(decoded.metadata), decoded.spec, Complaints()
    skipped = spec.type == "ExternalName" or spec.cluster_ip in (None, "", "None")
    if skipped or _of_another_proxy(decoded.metadata):
        return ServiceChanged(name, None)
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
    )
    return ServiceChanged(name, service, complaints.reported())


def _slice(decoded: fields.EndpointSlice) -> SliceChanged:
    head = decoded.metadata
    name, complaints = usable_name(head), Complaints()
    service = head.labels.service if head.labels else None
    if not service or decoded.address_type == "FQDN" or _of_another_proxy(head):
        return SliceChanged(name, None)
    if decoded.address_type not in FAMILIES:
        raise InvalidObject(f"addressType {shorten(repr(decoded.address_type))} is not one we know")
    if not NAME.fullmatch(service):
        raise InvalidObject(f"the label kubernetes.io/service-name holds no name: {shorten(repr(service))}")
    of = FAMILIES[decoded.address_type]
    trigger = head.annotations.trigger_time if head.annotations else None
    result = EndpointSlice(
        name=name,
        service=NamespacedName(name.namespace, service),
        family=of,
        ports=parts.slice_ports(decoded.ports or (), complaints),
        endpoints=parts.endpoints(decoded.endpoints or (), of, complaints),
        trigger_time=parts.moment(trigger) if trigger else None,
    )
    return SliceChanged(name, result, complaints.reported())


def _node(decoded: fields.Node) -> NodeChanged:
    head = decoded.metadata
    spec, status = decoded.spec or fields.NodeSpec(), decoded.status or fields.NodeStatus()
    if not head.name or not NAME.fullmatch(head.name):
        raise InvalidObject(f"metadata.name is not a usable name: {shorten(repr(head.name))}")
    leaving = any(taint and taint.key == "ToBeDeletedByClusterAutoscaler" for taint in spec.taints or ())
    node = Node(
        name=head.name,
        zone=(head.labels.zone if head.labels else None) or "",
        eligible=head.deletion_timestamp is None and not leaving,
        addresses=_addresses(status, "InternalIP"),
        external_addresses=_addresses(status, "ExternalIP"),
        pod_cidrs=parts.networks(spec.pod_cidrs or [spec.pod_cidr], "podCIDRs", Complaints()),
    )
    return NodeChanged(node)


def _addresses(status: fields.NodeStatus, of_type: str) -> tuple[Address, ...]:
    texts = (one.address for one in status.addresses or () if one and one.type == of_type)
    return parts.addresses(texts, "status.addresses", Complaints())


def _invalid(kind: str, raw: bytes | Raw, error: Exception) -> Invalid:
    """Name a bad object as well as it can be named. A Node has no namespace; nor may a junk object."""
    try:
        head = fields.OBJECT_HEAD_DECODER.decode(raw).metadata or fields.HeadMetadata()
        words = [head.namespace or ("" if kind in (NODE, MANIFEST) else "default"), head.name or ""]
        usable = all(NAME.fullmatch(word) for word in words if word) and words[1]
        name = "/".join(word for word in words if word) if usable else UNNAMED
    except JUNK:
        name = UNNAMED
    return Invalid(kind, name, shorten(str(error)) or type(error).__name__)


def _of_another_proxy(head: fields.Metadata) -> bool:
    """Whether the object carries a label that takes it away from proxies (KEP-2447, well_known_labels.go)."""
    labels = head.labels
    return labels is not None and (labels.proxy_name is not UNSET or labels.headless is not UNSET)
