"""The API fields that a proxy uses, as msgspec structs with the API's names, and their JSON decoders.

The decoders skip all other fields, including those of later API versions. Nearly all fields are optional,
because any field may be null or missing: Go's encoding/json permits both.
"""

import re

import msgspec
from msgspec import UNSET, Raw, UnsetType, field

DSR_PORT = "ebpfproxy/dsr-port"
"""The annotation with which a Node announces that it accepts tunneled packets, and at which UDP port."""
SOCKET_LB = "ebpfproxy/socket-lb"
"""The annotation of a pod or Namespace that says whether the socket path may serve it: on or off."""

_WRONG_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`(?: - at `(?:key in )?\$\.?([^`]*)`)?")
_TYPES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "str": "a string",
}


def explain(error: Exception, subject: str) -> str:
    """Return the text of a decoder's error, in plain words if a field has the wrong type.

    `subject` is what the text names if the outermost value has the wrong type.

    >>> explain(msgspec.ValidationError("Expected `object`, got `array`"), "a manifest")
    'a manifest must be an object, not a list'
    >>> explain(msgspec.ValidationError("Expected `int | null`, got `str` - at `$.ports[0].port`"), "it")
    'ports[0].port must be a whole number, not a string'
    """
    found = _WRONG_TYPE.fullmatch(str(error))
    if not found:
        return str(error)
    expected = [_TYPES.get(name, name) for name in found[1].split(" | ") if name != "null"]
    return f"{found[3] or subject} must be {' or '.join(expected)}, not {_TYPES.get(found[2], found[2])}"


class Api(msgspec.Struct, gc=False, rename="camel"):
    """The base of all structs. `gc=False`: decoded objects exist for one call and contain no cycles."""


class Labels(Api):
    """The labels that a proxy reads.

    The mere presence of the first two has an effect, so null and "" differ from missing (UNSET).
    """

    proxy_name: str | UnsetType | None = field(name="service.kubernetes.io/service-proxy-name", default=UNSET)
    headless: str | UnsetType | None = field(name="service.kubernetes.io/headless", default=UNSET)
    service: str | None = field(name="kubernetes.io/service-name", default=None)
    zone: str | None = field(name="topology.kubernetes.io/zone", default=None)


class Annotations(Api):
    trigger_time: str | None = field(name="endpoints.kubernetes.io/last-change-trigger-time", default=None)
    initial_events_end: str | None = field(name="k8s.io/initial-events-end", default=None)
    lb_algorithm: str | None = field(name="ebpfproxy/lb-algorithm", default=None)
    endpoint_weights: str | None = field(name="ebpfproxy/endpoint-weights", default=None)
    slow_start: str | None = field(name="ebpfproxy/slow-start", default=None)
    ipvs_forwarding: str | None = field(name="ebpfproxy/ipvs-forwarding", default=None)
    ebpf_forwarding: str | None = field(name="ebpfproxy/ebpf-forwarding", default=None)
    removed_endpoints: str | None = field(name="ebpfproxy/removed-endpoints", default=None)
    rebalance: str | None = field(name="ebpfproxy/rebalance", default=None)
    socket_lb: str | None = field(name=SOCKET_LB, default=None)
    dsr_port: str | None = field(name=DSR_PORT, default=None)
    config_hash: str | None = field(name="kubernetes.io/config.hash", default=None)


class Metadata(Api):
    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    labels: Labels | None = None
    annotations: Annotations | None = None
    deletion_timestamp: str | None = None


class ServicePort(Api):
    name: str | None = None
    protocol: str | None = None
    port: int | None = None
    node_port: int | None = None


class ClientIP(Api):
    timeout_seconds: int | None = None


class AffinityConfig(Api):
    client_ip: ClientIP | None = field(name="clientIP", default=None)


class ServiceSpec(Api):
    type: str | None = None
    cluster_ip: str | None = field(name="clusterIP", default=None)
    cluster_ips: list[str | None] | None = field(name="clusterIPs", default=None)
    ip_families: list[str | None] | None = None
    external_ips: list[str | None] | None = field(name="externalIPs", default=None)
    ports: list[ServicePort | None] | None = None
    session_affinity: str | None = None
    session_affinity_config: AffinityConfig | None = None
    load_balancer_source_ranges: list[str | None] | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    health_check_node_port: int | None = None


class Ingress(Api):
    ip: str | None = None
    ip_mode: str | None = None


class LoadBalancer(Api):
    ingress: list[Ingress | None] | None = None


class ServiceStatus(Api):
    load_balancer: LoadBalancer | None = None


class Service(Api):
    metadata: Metadata
    spec: ServiceSpec
    status: ServiceStatus | None = None


class SlicePort(Api):
    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class Conditions(Api):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Hint(Api):
    name: str | None = None


class Hints(Api):
    for_zones: list[Hint | None] | None = None
    for_nodes: list[Hint | None] | None = None


class TargetRef(Api):
    kind: str | None = None
    namespace: str | None = None


class Endpoint(Api):
    """An endpoint of a slice.

    `hints` stay JSON until HINTS_DECODER reads them: few distinct texts occur many times, so they are cached.
    """

    addresses: list[str | None] | None = None
    conditions: Conditions | None = None
    hints: Raw = Raw(b"")
    node_name: str | None = None
    target_ref: TargetRef | None = None


class EndpointSlice(Api):
    metadata: Metadata
    address_type: str | None = None
    endpoints: list[Endpoint | None] | None = None
    ports: list[SlicePort | None] | None = None


class Taint(Api):
    key: str | None = None


class NodeSpec(Api):
    pod_cidrs: list[str | None] | None = field(default=None, name="podCIDRs")
    pod_cidr: str | None = field(default=None, name="podCIDR")
    taints: list[Taint | None] | None = None


class NodeAddress(Api):
    type: str | None = None
    address: str | None = None


class NodeStatus(Api):
    addresses: list[NodeAddress | None] | None = None


class Node(Api):
    metadata: Metadata
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class ContainerPort(Api):
    container_port: int | None = None
    host_port: int | None = None
    host_ip: str | None = field(default=None, name="hostIP")
    protocol: str | None = None


class Container(Api):
    ports: list[ContainerPort | None] | None = None


class PodSpec(Api):
    node_name: str | None = None
    host_network: bool | None = None
    containers: list[Container | None] | None = None
    init_containers: list[Container | None] | None = None


class PodIP(Api):
    ip: str | None = None


class PodStatus(Api):
    phase: str | None = None
    pod_ip: str | None = field(default=None, name="podIP")
    pod_ips: list[PodIP | None] | None = field(default=None, name="podIPs")


class Pod(Api):
    metadata: Metadata
    spec: PodSpec
    status: PodStatus | None = None


class Namespace(Api):
    metadata: Metadata


class ServiceCIDRSpec(Api):
    cidrs: list[str | None] | None = None


class ServiceCIDR(Api):
    metadata: Metadata
    spec: ServiceCIDRSpec | None = None


class ListMetadata(Api):
    resource_version: str | None = None
    continue_token: str | None = field(name="continue", default=None)
    remaining: int | None = field(name="remainingItemCount", default=None)
    annotations: Annotations | None = None


class List(Api):
    metadata: ListMetadata
    items: list[Raw] | None


class WatchEvent(Api):
    type: str
    object: Raw


class WatchObject(Api):
    """The fields read from the object of every watch event. The last three are those of a Status."""

    metadata: ListMetadata | None = None
    code: int | None = None
    message: str | None = None
    reason: str | None = None


class HeadMetadata(Api):
    """Identity and version. `resource_version` accepts any type, so junk in it does not hide the name."""

    name: str | None = None
    namespace: str | None = None
    resource_version: object = None


class ObjectHead(Api):
    metadata: HeadMetadata | None = None


class Manifest(Api):
    kind: str | None = None
    api_version: str | None = None
    items: list[Raw] | None = None


SERVICE_DECODER = msgspec.json.Decoder(Service)
SLICE_DECODER = msgspec.json.Decoder(EndpointSlice)
POD_DECODER = msgspec.json.Decoder(Pod)
NAMESPACE_DECODER = msgspec.json.Decoder(Namespace)
SERVICE_CIDR_DECODER = msgspec.json.Decoder(ServiceCIDR)
NODE_DECODER = msgspec.json.Decoder(Node)
LIST_DECODER = msgspec.json.Decoder(List)
WATCH_EVENT_DECODER = msgspec.json.Decoder(WatchEvent)
WATCH_OBJECT_DECODER = msgspec.json.Decoder(WatchObject)
OBJECT_HEAD_DECODER = msgspec.json.Decoder(ObjectHead)
HINTS_DECODER = msgspec.json.Decoder(Hints | None)
MANIFEST_DECODER = msgspec.json.Decoder(Manifest)
