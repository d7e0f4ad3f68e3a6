"""From the API's JSON to values: Services, EndpointSlices, Nodes, lists and watch events."""

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebpfproxy.api.event import (
    Invalid,
    NodeChanged,
    PeerChanged,
    ServiceChanged,
    ServiceCidrChanged,
    SliceChanged,
    Unserved,
)
from ebpfproxy.api.parse import (
    UNNAMED,
    object_head,
    parse_list,
    parse_manifest_object,
    parse_node,
    parse_peer,
    parse_service,
    parse_service_cidr,
    parse_slice,
    parse_status_reason,
    parse_watch_event,
)
from ebpfproxy.errors import SourceError
from ebpfproxy.model.address import Family, Protocol, parse_address, parse_network
from ebpfproxy.model.endpoint import Endpoint, EndpointPort, Endpoints, EndpointSlice
from ebpfproxy.model.node import Node, PeerNode
from ebpfproxy.model.service import NamespacedName, Service, ServicePort, ServiceType, TrafficPolicy
from tests.support.build import networks, node_object, service_object, slice_object
from tests.support.examples import examples
from tests.support.junk import damage_value

WEB = NamespacedName("default", "web")


def as_json(value: object) -> bytes:
    return msgspec.json.encode(value)


def changed_service(spec: Mapping[str, Any] | None = None, **metadata: Any) -> ServiceChanged:
    event = parse_service(as_json(service_object("web", spec, **metadata)))
    assert isinstance(event, ServiceChanged), event
    return event


def service(spec: Mapping[str, Any] | None = None) -> Service:
    event = changed_service(spec)
    assert event.service is not None
    assert event.complaints == ()
    return event.service


def changed_slice(*endpoints: Mapping[str, Any], **more: Any) -> SliceChanged:
    event = parse_slice(as_json(slice_object("web", endpoints, **more)))
    assert isinstance(event, SliceChanged), event
    return event


def slice_(*endpoints: Mapping[str, Any], **more: Any) -> EndpointSlice:
    event = changed_slice(*endpoints, **more)
    assert event.slice is not None
    assert event.complaints == ()
    return event.slice


# --- Services ---


def test_a_service_with_all_fields_is_parsed_completely() -> None:
    raw = service_object(
        "shop/web",
        {
            "type": "LoadBalancer",
            "clusterIP": "10.96.0.10",
            "clusterIPs": ["10.96.0.10", "fd00::10"],
            "ipFamilies": ["IPv4", "IPv6"],
            "externalIPs": ["192.0.2.1", "", "2001:db8::1"],
            "ports": [
                {"name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080, "targetPort": "web"},
                {"name": "dns", "protocol": "UDP", "port": 53},
                {"name": "dns", "port": 53},
                {"name": "sig", "protocol": "SCTP", "port": 3868},
            ],
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}},
            "loadBalancerSourceRanges": [" 198.51.100.7/24 ", "2001:db8::/32"],
            "internalTrafficPolicy": "Local",
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 32000,
            "somethingOfALaterVersion": {"a": [1]},
        },
    ) | {
        "status": {
            "loadBalancer": {"ingress": [{"ip": "203.0.113.7", "ipMode": "VIP"}, {"ip": "203.0.113.8"}]}
        }
    }
    assert parse_service(as_json(raw)) == ServiceChanged(
        NamespacedName("shop", "web"),
        Service(
            name=NamespacedName("shop", "web"),
            ports=(
                ServicePort("http", Protocol.TCP, 80, 30080),
                ServicePort("dns", Protocol.UDP, 53, 0),
                ServicePort("dns", Protocol.TCP, 53, 0),
                ServicePort("sig", Protocol.SCTP, 3868, 0),
            ),
            cluster_ips=(parse_address("10.96.0.10"), parse_address("fd00::10")),
            external_ips=(parse_address("192.0.2.1"), parse_address("2001:db8::1")),
            load_balancer_ips=(parse_address("203.0.113.7"), parse_address("203.0.113.8")),
            source_ranges=networks(["198.51.100.0/24", "2001:db8::/32"]),
            type=ServiceType.LOAD_BALANCER,
            internal_policy=TrafficPolicy.LOCAL,
            external_policy=TrafficPolicy.LOCAL,
            affinity_timeout=600,
            health_check_node_port=32000,
        ),
    )


@pytest.mark.parametrize(
    ("spec", "unserved"),
    [
        ({"clusterIP": None}, Unserved.NO_CLUSTER_IP),
        ({"clusterIP": ""}, Unserved.NO_CLUSTER_IP),
        ({"clusterIP": "None"}, Unserved.HEADLESS),
        ({"type": "ExternalName"}, Unserved.EXTERNAL_NAME),
    ],
    ids=["null", "empty", "headless", "ExternalName"],
)
def test_a_service_without_a_cluster_ip_is_not_served(spec: dict[str, Any], unserved: Unserved) -> None:
    assert changed_service(spec) == ServiceChanged(WEB, None, unserved=unserved)


@pytest.mark.parametrize("value", ["", "x", None])
def test_a_label_excludes_objects_of_its_kind_for_any_value(value: str | None) -> None:
    """The selectors of kube-proxy since 1.32."""
    other, headless = "service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"
    unserved = ServiceChanged(WEB, None, unserved=Unserved.OTHER_PROXY)
    assert changed_service(labels={other: value}) == unserved
    assert changed_service(labels={headless: value}).service
    for label, is_used in ((other, True), (headless, False)):
        raw = slice_object("web", [{"addresses": ["10.1.0.1"]}])
        raw["metadata"]["labels"][label] = value
        event = parse_slice(as_json(raw))
        assert isinstance(event, SliceChanged)
        assert (event.slice is not None) is is_used


def test_a_service_cidr_has_the_networks_of_both_families() -> None:
    raw = {"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/16", "junk", "fd00::/112"]}}
    (event,) = parse_manifest_object(as_json(raw | {"kind": "ServiceCIDR"}), "here")
    networks = (parse_network("10.96.0.0/16"), parse_network("fd00::/112"))
    assert event == ServiceCidrChanged("kubernetes", networks, ("spec.cidrs: 'junk' is not a CIDR",))
    invalid = parse_service_cidr(as_json({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": "x"}}))
    assert invalid == Invalid("ServiceCIDR", "kubernetes", "spec.cidrs must be a list, not a string")


def test_an_object_older_than_dual_stack_has_only_its_cluster_ip() -> None:
    old = service({"clusterIPs": None, "ipFamilies": None, "clusterIP": "fd00::1"})
    assert old.cluster_ips == (parse_address("fd00::1"),)


def test_a_cluster_ip_of_another_family_than_ip_families_is_left_out() -> None:
    event = changed_service({"clusterIPs": ["10.96.0.10", "10.96.0.11"], "ipFamilies": ["IPv4", "IPv6"]})
    assert event.service is not None
    assert event.service.cluster_ips == (parse_address("10.96.0.10"),)
    assert event.complaints == ("clusterIPs: 10.96.0.11 is not of the family in ipFamilies",)


def test_leading_zeros_are_decimal() -> None:
    spec = {"clusterIP": "010.096.000.010", "clusterIPs": ["010.096.000.010"]}
    assert service(spec).cluster_ips == (parse_address("10.96.0.10"),)


def test_a_service_whose_only_cluster_ip_is_junk_is_invalid() -> None:
    event = parse_service(as_json(service_object("web", {"clusterIP": "junk", "clusterIPs": ["junk"]})))
    assert event == Invalid("Service", "default/web", "clusterIPs: 'junk' is not an IP address")


def test_null_lists_of_a_service_are_empty() -> None:
    fields = ("externalIPs", "ports", "loadBalancerSourceRanges", "sessionAffinityConfig", "ipFamilies")
    read = service(dict.fromkeys(fields))
    assert (read.ports, read.external_ips, read.source_ranges) == ((), (), ())


def test_junk_addresses_are_left_out_with_a_complaint_and_blank_ones_silently() -> None:
    event = changed_service({"externalIPs": ["", " ", "192.0.2.1", "nonsense", "0.0.0.0", "::", "192.0.2.1"]})
    assert event.service is not None
    assert event.service.external_ips == (parse_address("192.0.2.1"),)
    assert event.complaints == (
        "externalIPs: 'nonsense' is not an IP address",
        "externalIPs: 0.0.0.0 cannot be served",
        "externalIPs: :: cannot be served",
    )


def test_a_load_balancer_of_ip_mode_proxy_is_left_out() -> None:
    ingress = [
        {"ip": "203.0.113.1", "ipMode": "Proxy"},
        {"ip": "203.0.113.2", "ipMode": "VIP"},
        {"ip": "203.0.113.3"},
        {"hostname": "lb.example.org"},
        None,
    ]
    event = parse_service(as_json(service_object() | {"status": {"loadBalancer": {"ingress": ingress}}}))
    assert isinstance(event, ServiceChanged)
    assert event.service is not None
    assert event.service.load_balancer_ips == (parse_address("203.0.113.2"), parse_address("203.0.113.3"))
    assert event.complaints == ()


@pytest.mark.parametrize("status", [None, {}, {"loadBalancer": None}, {"loadBalancer": {"ingress": None}}])
def test_a_service_without_a_load_balancer_has_no_load_balancer_addresses(status: Any) -> None:
    event = parse_service(as_json(service_object() | {"status": status}))
    assert isinstance(event, ServiceChanged)
    assert event.service is not None
    assert event.service.load_balancer_ips == ()


def test_source_ranges_that_are_all_junk_do_not_open_the_service() -> None:
    """kube-proxy drops invalid ranges. A Service without any remaining range then admits every client."""
    event = parse_service(as_json(service_object("web", {"loadBalancerSourceRanges": ["10.0.0.0/64"]})))
    assert isinstance(event, Invalid)
    assert "admit every client" in event.reason


def test_a_junk_source_range_beside_a_good_one_is_left_out() -> None:
    event = changed_service({"loadBalancerSourceRanges": ["10.0.0.0/64", "10.0.0.0/8", ""]})
    assert event.service is not None
    assert event.service.source_ranges == networks(["10.0.0.0/8"])
    assert event.complaints == ("loadBalancerSourceRanges: '10.0.0.0/64' is not a CIDR",)


@pytest.mark.parametrize("config", [None, {}, {"clientIP": None}, {"clientIP": {"timeoutSeconds": None}}])
def test_affinity_without_a_timeout_has_the_default_timeout(config: Any) -> None:
    assert service({"sessionAffinity": "ClientIP", "sessionAffinityConfig": config}).affinity_timeout == 10800


@pytest.mark.parametrize("affinity", [None, "", "None"])
def test_a_timeout_without_affinity_is_ignored(affinity: str | None) -> None:
    config = {"clientIP": {"timeoutSeconds": 5}}
    assert service({"sessionAffinity": affinity, "sessionAffinityConfig": config}).affinity_timeout == 0


@pytest.mark.parametrize(
    ("timeout", "taken"), [(1, 1), (86400, 86400), (0, 10800), (86401, 10800), (-1, 10800)]
)
def test_a_timeout_out_of_range_becomes_the_default_timeout(timeout: int, taken: int) -> None:
    config = {"clientIP": {"timeoutSeconds": timeout}}
    event = changed_service({"sessionAffinity": "ClientIP", "sessionAffinityConfig": config})
    assert event.service is not None
    assert event.service.affinity_timeout == taken
    assert bool(event.complaints) is (timeout != taken)


def test_ports_that_cannot_be_served_are_left_out_with_a_complaint() -> None:
    ports = [
        {"name": "quic", "protocol": "QUIC", "port": 1},
        {"name": "zero", "port": 0},
        {"name": "big", "port": 65536},
        {"name": "huge", "port": 2**70},
        {"name": "none"},
        {"name": "a b", "port": 2},
        {"name": "edge", "port": 65535, "nodePort": 65536},
        {"name": "edge", "port": 3},
        None,
    ]
    event = changed_service({"ports": ports})
    assert event.service is not None
    assert event.service.ports == (ServicePort("edge", Protocol.TCP, 65535, 0),)
    assert len(event.complaints) == 8


def test_many_complaints_are_cut_short() -> None:
    event = changed_service({"externalIPs": [f"junk-{number}" for number in range(100)]})
    assert len(event.complaints) == 9
    assert event.complaints[-1] == "and 92 more"


def test_values_of_later_api_versions_become_the_default() -> None:
    spec = {
        "type": "Mesh",
        "internalTrafficPolicy": "Near",
        "externalTrafficPolicy": "Far",
        "sessionAffinity": "X",
    }
    event = changed_service(spec)
    assert event.service is not None
    assert event.service.type is ServiceType.CLUSTER_IP
    assert event.service.internal_policy is event.service.external_policy is TrafficPolicy.CLUSTER
    assert event.service.affinity_timeout == 0
    assert len(event.complaints) == 4


# --- EndpointSlices ---


def test_a_slice_with_all_fields_is_parsed_completely() -> None:
    raw = slice_object(
        "shop/web",
        [
            {
                "addresses": ["10.1.0.1", "10.1.0.2", "junk"],
                "conditions": {"ready": False, "serving": True, "terminating": True},
                "nodeName": "here",
                "zone": "zone-z",
                "hints": {
                    "forZones": [{"name": "zone-a"}, {"name": "zone-b"}],
                    "forNodes": [{"name": "here"}],
                },
            },
            {"addresses": ["010.1.0.3"]},
        ],
        [{"name": "http", "protocol": "TCP", "port": 8080}, {"name": "dns", "protocol": "UDP", "port": 53}],
    )
    key = "endpoints.kubernetes.io/last-change-trigger-time"
    raw["metadata"]["annotations"] = {key: "2024-05-01T10:00:00.5Z"}
    assert parse_slice(as_json(raw)) == SliceChanged(
        NamespacedName("shop", "web-1"),
        EndpointSlice(
            name=NamespacedName("shop", "web-1"),
            service=NamespacedName("shop", "web"),
            family=Family.IPV4,
            ports=(EndpointPort("http", Protocol.TCP, 8080), EndpointPort("dns", Protocol.UDP, 53)),
            endpoints=Endpoints(
                (
                    Endpoint(
                        address=parse_address("10.1.0.1"),
                        ready=False,
                        serving=True,
                        terminating=True,
                        node="here",
                        zones=frozenset({"zone-a", "zone-b"}),
                        nodes=frozenset({"here"}),
                    ),
                    Endpoint(parse_address("10.1.0.3")),
                )
            ),
            trigger_time=1714557600.5,
        ),
    )


@pytest.mark.parametrize("conditions", [None, {}, {"ready": None, "serving": None, "terminating": None}])
def test_unknown_conditions_mean_ready_serving_and_not_terminating(conditions: Any) -> None:
    (endpoint,) = slice_({"addresses": ["10.1.0.1"], "conditions": conditions}).endpoints
    assert (endpoint.ready, endpoint.serving, endpoint.terminating) == (True, True, False)


def test_an_endpoint_may_be_ready_and_terminating_at_once() -> None:
    """publishNotReadyAddresses; never derive one condition from the others (kubernetes PR 119394)."""
    conditions = {"ready": True, "serving": False, "terminating": True}
    (endpoint,) = slice_({"addresses": ["10.1.0.1"], "conditions": conditions}).endpoints
    assert (endpoint.ready, endpoint.serving, endpoint.terminating) == (True, False, True)


@pytest.mark.parametrize(
    "hints", [None, {}, {"forZones": None, "forNodes": []}, {"forZones": [None, {}, {"name": ""}]}]
)
def test_hints_without_names_are_empty(hints: Any) -> None:
    (endpoint,) = slice_({"addresses": ["10.1.0.1"], "hints": hints}).endpoints
    assert (endpoint.zones, endpoint.nodes) == (frozenset(), frozenset())


def test_equal_hints_and_node_names_are_one_object_in_memory() -> None:
    one = {"addresses": ["10.1.0.1"], "nodeName": "node-x", "hints": {"forZones": [{"name": "zone-x"}]}}
    first, second = slice_(one, dict(one, addresses=["10.1.0.2"])).endpoints
    assert first.node is second.node
    assert first.zones is second.zones


def test_null_lists_of_a_slice_are_empty() -> None:
    raw = slice_object("web") | {"endpoints": None, "ports": None}
    event = parse_slice(as_json(raw))
    assert isinstance(event, SliceChanged)
    assert event.slice is not None
    assert (event.slice.endpoints, event.slice.ports, event.slice.trigger_time) == (Endpoints(), (), None)


def test_a_port_of_a_slice_without_a_name_has_the_name_that_the_api_server_writes() -> None:
    ports = [{"port": 1}, {"name": None, "port": 2}, {"name": "", "port": 3}]
    assert slice_(ports=ports).ports == tuple(EndpointPort("", Protocol.TCP, each) for each in (1, 2, 3))


def test_ports_of_a_slice_without_a_number_are_ignored() -> None:
    assert slice_(ports=[{"name": "a"}, {"name": "b", "port": 0}]).ports == ()


def test_ports_of_a_slice_out_of_range_are_left_out_with_a_complaint() -> None:
    event = changed_slice(ports=[{"name": "", "port": -1}, {"name": "", "port": 65536}])
    assert event.slice is not None
    assert event.slice.ports == ()
    assert event.complaints == (
        "ports: -1 is not a port number (1 to 65535)",
        "ports: 65536 is not a port number (1 to 65535)",
    )


@pytest.mark.parametrize(
    ("address_type", "address"),
    [
        ("IPv4", "fd00::1"),
        ("IPv6", "10.1.0.1"),
        ("IPv6", "::ffff:10.1.0.1"),
        ("IPv4", "0.0.0.0"),
        ("IPv6", "::"),
        ("IPv4", "junk"),
        ("IPv4", ""),
    ],
)
def test_an_address_of_the_wrong_family_is_left_out_with_a_complaint(address_type: str, address: str) -> None:
    good = "10.1.0.9" if address_type == "IPv4" else "fd00::9"
    event = changed_slice({"addresses": [address]}, {"addresses": [good]}, address_type=address_type)
    assert event.slice is not None
    assert [endpoint.address for endpoint in event.slice.endpoints] == [parse_address(good)]
    assert len(event.complaints) == 1


def test_a_slice_of_fqdns_or_without_a_service_is_not_served() -> None:
    named = NamespacedName("default", "web-1")
    assert changed_slice(address_type="FQDN") == SliceChanged(named, None)
    for labels in (None, {}, {"kubernetes.io/service-name": ""}):
        raw = slice_object("web")
        raw["metadata"]["labels"] = labels
        assert parse_slice(as_json(raw)) == SliceChanged(named, None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:01Z", 1.0),
        ("1970-01-01T01:00:01.25+01:00", 1.25),
        ("2024-05-01T10:00:00.123456789Z", pytest.approx(1714557600.123456789, abs=1e-6)),
        ("2024-05-01T10:00:00", None),
        ("2024-05-01", None),
        ("2024-13-01T10:00:00Z", None),
        ("yesterday", None),
        ("", None),
        ("\x00", None),
        (None, None),
    ],
)
def test_the_trigger_time_is_rfc3339_or_none(text: str | None, seconds: float | None) -> None:
    raw = slice_object("web")
    raw["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": text}
    event = parse_slice(as_json(raw))
    assert isinstance(event, SliceChanged)
    assert event.slice is not None
    assert event.slice.trigger_time == seconds


# --- Nodes ---


def test_a_node_is_read_with_its_zone_and_addresses() -> None:
    raw = node_object(
        "here", {"topology.kubernetes.io/zone": "zone-a"}, ["192.0.2.10", "2001:db8::10", "junk"]
    )
    raw["status"]["addresses"].append({"type": "ExternalIP", "address": "198.51.100.1"})
    expected = Node(
        "here",
        "zone-a",
        addresses=(parse_address("192.0.2.10"), parse_address("2001:db8::10")),
        external_addresses=(parse_address("198.51.100.1"),),
    )
    assert parse_node(as_json(raw)) == NodeChanged(expected)


def test_a_node_that_is_being_removed_is_not_eligible() -> None:
    """KEP-3836: being deleted, or about to be removed by the cluster autoscaler."""
    tainted = node_object("here")
    tainted["spec"] = {"taints": [None, {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}
    deleted = node_object("here")
    deleted["metadata"]["deletionTimestamp"] = "2024-05-01T10:00:00Z"
    cordoned = node_object("here")
    cordoned["spec"] = {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unschedulable"}]}
    for raw, eligible in ((tainted, False), (deleted, False), (cordoned, True)):
        assert parse_node(as_json(raw)) == NodeChanged(Node("here", eligible=eligible))


# --- Names ---


@pytest.mark.parametrize("name", ["", None, "a b", "a\nb", 'a"b', "-A", "x" * 254, "ünï", "a\x00"])
def test_a_name_that_could_break_out_of_a_rule_is_invalid(name: str | None) -> None:
    raw = service_object("web")
    raw["metadata"]["name"] = name
    event = parse_service(as_json(raw))
    assert isinstance(event, Invalid)
    assert event.name == UNNAMED
    assert object_head(as_json(raw)).name is None


def test_an_invalid_object_is_reported_with_its_name() -> None:
    raw = service_object("shop/web", {"ports": "none"})
    event = parse_service(as_json(raw))
    assert isinstance(event, Invalid)
    assert (event.kind, event.name) == ("Service", "shop/web")
    assert event.reason == "spec.ports must be a list, not a string"
    assert object_head(as_json(raw)).name == NamespacedName("shop", "web")


@pytest.mark.parametrize(
    ("raw", "name", "version"),
    [
        (b'{"metadata":{"namespace":"shop","name":"web","resourceVersion":"7"}}', ("shop", "web"), "7"),
        (b'{"metadata":{"name":"web","resourceVersion":"7"}}', ("default", "web"), "7"),
        (b'{"metadata":{"name":"web"}}', ("default", "web"), ""),
        (b'{"metadata":{"name":"web","resourceVersion":null}}', ("default", "web"), ""),
        (b'{"metadata":{"name":"web","resourceVersion":[7]}}', ("default", "web"), ""),
        (b'{"metadata":{"name":"web","resourceVersion":"7","labels":5},"spec":1}', ("default", "web"), "7"),
        (b'{"metadata":{"name":"a b","resourceVersion":"7"}}', None, "7"),
        (b'{"metadata":{"name":["web"],"resourceVersion":"7"}}', None, ""),
        (b'{"metadata":null}', None, ""),
        (b"{}", None, ""),
        (b"[]", None, ""),
        (b"", None, ""),
    ],
)
def test_the_head_is_read_whatever_else_is_in_the_object(
    raw: bytes, name: tuple[str, str] | None, version: str
) -> None:
    assert object_head(raw) == (name, version)


# --- Lists and watch events ---


def test_a_page_of_a_list_keeps_its_items_as_bytes() -> None:
    body = (
        b'{"kind":"ServiceList","metadata":{"resourceVersion":"7","continue":"abc","remainingItemCount":3},'
    )
    body += b'"items":[{"a":1},[],"x"]}'
    page = parse_list(body)
    assert [bytes(item) for item in page.items] == [b'{"a":1}', b"[]", b'"x"']
    assert page[1:] == ("7", "abc", 3)


@pytest.mark.parametrize("items", [b"null", b"[]"])
def test_an_empty_list_may_be_null(items: bytes) -> None:
    page = parse_list(b'{"metadata":{"resourceVersion":"7","continue":""},"items":' + items + b"}")
    assert page == ((), "7", "", None)


def test_an_item_that_is_invalid_json_text_does_not_fail_the_page() -> None:
    good = as_json(service_object("web"))
    for bad in (b'{"metadata":{"name":"\\ud800"}}', b'{"metadata":{"name":"\xff"}}'):
        page = parse_list(b'{"metadata":{"resourceVersion":"7"},"items":[' + bad + b"," + good + b"]}")
        first, second = map(parse_service, page.items)
        assert isinstance(first, Invalid)
        assert second == parse_service(good)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"null",
        b"[]",
        b"<html>",
        b'{"items":[]}',
        b'{"metadata":{},"items":[]}',
        b'{"metadata":{"resourceVersion":""},"items":[]}',
        b'{"metadata":{"resourceVersion":"7"}}',
        b'{"metadata":{"resourceVersion":"7"},"items":{}}',
        b'{"metadata":{"resourceVersion":"7"},"items":[{"a":1}',
        b'{"metadata":{"resourceVersion":"7"},"items":[' + b"[" * 100_000,
        b'{"kind":"Status","metadata":{},"code":403}',
    ],
)
def test_an_invalid_list_envelope_is_a_source_error(body: bytes) -> None:
    with pytest.raises(SourceError):
        parse_list(body)


def test_a_watch_event_has_type_version_and_object() -> None:
    event = parse_watch_event(
        b'{"type":"MODIFIED","object":{"metadata":{"name":"a","resourceVersion":"9"},"code":5}}'
    )
    assert (event.type, event.resource_version, event.code, event.message) == ("MODIFIED", "9", 0, "")
    assert not event.initial_events_end
    assert object_head(event.object).name == NamespacedName("default", "a")


def test_the_bookmark_that_ends_the_initial_events_is_recognized() -> None:
    line = b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9"%s}}}'
    note = b',"annotations":{"k8s.io/initial-events-end":"true"}'
    assert not parse_watch_event(line % b"").initial_events_end
    assert parse_watch_event(line % note).initial_events_end


def test_an_error_event_has_code_and_message() -> None:
    status = (
        b'{"kind":"Status","metadata":{},"code":410,"reason":"Expired","message":"too old resource version"}'
    )
    event = parse_watch_event(b'{"type":"ERROR","object":' + status + b"}\n")
    assert (event.type, event.code, event.message) == ("ERROR", 410, "too old resource version")
    assert parse_status_reason(status) == (410, "too old resource version")
    assert parse_status_reason(b"<html>") == (0, "")


@pytest.mark.parametrize(
    "junk", [b"null", b"[]", b'{"metadata":5}', b'{"metadata":{"resourceVersion":5}}', b'"\xff"']
)
def test_an_invalid_object_in_a_watch_event_does_not_fail_the_event(junk: bytes) -> None:
    event = parse_watch_event(b'{"type":"ADDED","object":' + junk + b"}")
    assert event.resource_version == ""
    assert isinstance(parse_service(event.object), Invalid)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"null",
        b'{"type":"ADDED"}',
        b'{"type":"GONE","object":{}}',
        b'{"type":1,"object":{}}',
        b"\xff",
    ],
)
def test_a_line_that_is_not_a_watch_event_is_a_source_error(line: bytes) -> None:
    with pytest.raises(SourceError):
        parse_watch_event(line)


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("6083", 6083),
        ("65535", 65535),
        ("65536", 0),
        ("", 0),
        ("-1", 0),
        ("6083/udp", 0),
        ("²", 0),
        ("0" * 9, 0),
    ],
)
def test_a_node_announces_direct_server_return_with_a_port(text: str, port: int) -> None:
    raw = node_object("there", addresses=["192.0.2.10", "fd00::10"])
    raw["metadata"]["annotations"] = {"ebpfproxy/dsr-port": text}
    addresses = parse_address("192.0.2.10"), parse_address("fd00::10")
    assert parse_peer(as_json(raw)) == PeerChanged("there", PeerNode(addresses, port))
    own = parse_node(as_json(raw))
    assert isinstance(own, NodeChanged)
    assert own.node
    assert own.node.dsr_port == port


def test_a_peer_has_its_addresses_of_all_types() -> None:
    raw = node_object("there", addresses=["192.0.2.10"])
    raw["status"]["addresses"] += [
        {"type": "ExternalIP", "address": "203.0.113.10"},
        {"type": "Hostname", "address": "there"},
        {"type": "InternalDNS", "address": "fd00::10"},
        {"address": "192.0.2.99"},
    ]
    internal, *others = map(parse_address, ("192.0.2.10", "203.0.113.10", "fd00::10"))
    assert parse_peer(as_json(raw)) == PeerChanged("there", PeerNode((internal,), 0, tuple(others)))


def test_a_peer_without_a_usable_name_is_an_invalid_node() -> None:
    assert parse_peer(as_json(node_object("a b"))) == parse_node(as_json(node_object("a b")))
    assert isinstance(parse_peer(b"[]"), Invalid)


# --- Manifests ---


def test_lists_in_manifests_yield_their_items_and_other_nodes_are_only_peers() -> None:
    inner = {
        "kind": "ServiceList",
        "apiVersion": "v1",
        "items": [{"metadata": {"name": "a"}, "spec": {"clusterIP": ""}}],
    }
    objects = [service_object("web"), slice_object("web"), node_object("here"), node_object("there"), inner]
    events = parse_manifest_object(as_json({"kind": "List", "apiVersion": "v1", "items": objects}), "here")
    kinds = [ServiceChanged, SliceChanged, NodeChanged, PeerChanged, PeerChanged, ServiceChanged]
    assert [type(event) for event in events] == kinds
    assert events[4] == PeerChanged("there", PeerNode())
    name = NamespacedName("default", "a")
    assert events[5] == ServiceChanged(name, None, unserved=Unserved.NO_CLUSTER_IP)


def test_an_object_without_a_namespace_is_in_default() -> None:
    raw = service_object("web")
    del raw["metadata"]["namespace"]
    (event,) = parse_manifest_object(as_json(raw), "here")
    assert isinstance(event, ServiceChanged)
    assert event.name == WEB


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        ({"kind": "Deployment", "apiVersion": "apps/v1", "metadata": {"name": "d"}}, "apps/v1 Deployment"),
        ({"kind": "Service", "apiVersion": "serving.knative.dev/v1", "metadata": {"name": "d"}}, "knative"),
        ({"metadata": {"name": "d"}}, "kind none"),
        ({"kind": "ConfigMapList", "metadata": {"name": "d"}, "items": []}, "ConfigMapList"),
    ],
)
def test_kinds_that_a_proxy_does_not_read_are_invalid_and_named(raw: Any, what: str) -> None:
    (event,) = parse_manifest_object(as_json(raw), "here")
    assert isinstance(event, Invalid)
    assert event.name == "d"
    assert what in event.reason


def test_lists_nested_too_deep_are_invalid() -> None:
    raw = b'{"kind":"List","items":[' * 50 + b"]}" * 50
    (event,) = parse_manifest_object(raw, "here")
    assert isinstance(event, Invalid)
    assert parse_manifest_object(b'{"kind":"List","items":null}', "here") == []


# --- Junk ---

PARSERS = (parse_service, parse_slice, parse_node, parse_peer, parse_service_cidr)


def assert_usable(raw: bytes) -> None:
    for parse in PARSERS:
        event = parse(raw)
        assert not isinstance(event, Invalid) or (event.name and event.reason)
    object_head(raw)
    for one in parse_manifest_object(raw, "here"):
        assert not isinstance(one, Invalid) or (one.name and one.reason)
    for envelope in (parse_list, parse_watch_event):
        with contextlib.suppress(SourceError):
            envelope(raw)


@given(st.binary(max_size=200))
def test_random_bytes_do_not_make_a_parser_raise(raw: bytes) -> None:
    assert_usable(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("metadata", "name", "spec", "items", "kind", "ports")), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_random_json_does_not_make_a_parser_raise(value: Any) -> None:
    try:
        raw = as_json(value)
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return  # a lone surrogate, an integer beyond 64 bits
    assert_usable(raw)


@given(
    st.integers(0, 2**32), st.integers(1, 12), st.sampled_from((service_object, slice_object, node_object))
)
@settings(max_examples=examples(500))
def test_a_damaged_valid_object_does_not_make_a_parser_raise(seed: int, often: int, make: Any) -> None:
    pick, value = random.Random(seed), make()
    for _ in range(often):
        damage_value(value, pick)
    assert_usable(as_json(value))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"metadata":' * 100_000,
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"spec":{"ports":[{"port":' + b"9" * 100_000 + b"}]}}",
        b'{"metadata":{"name":"a\\u0000b"},"spec":{}}',
        b'{"metadata":{"name":"\\ud800"},"spec":{}}',
        b'{"metadata":{"name":"\\ud800\\udc00"},"spec":{}}',
        b'{"metadata":{"name":"\xc3\x28"},"spec":{}}',
        b'{"metadata":{"name":"a"},"spec":{"clusterIP":"\\u0000","ports":[{"port":1e400}]}}',
        b'{"metadata":{"name":"a"},"spec":{"clusterIP":"1","clusterIPs":["\\u0000"]}}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_hostile_bytes_do_not_make_a_parser_raise(raw: bytes) -> None:
    assert_usable(raw)


@pytest.mark.parametrize(
    ("target", "own"),
    [
        ({"kind": "Pod", "namespace": "default", "name": "web-0"}, True),
        ({"kind": "Pod", "namespace": "other", "name": "web-0"}, False),
        ({"kind": "VirtualMachine", "namespace": "default"}, False),
        ({"kind": "Pod"}, False),
        (None, False),
    ],
)
def test_an_endpoint_is_a_pod_of_the_namespace_by_its_target(
    target: dict[str, str] | None, own: bool
) -> None:
    endpoints = [{"addresses": ["10.1.0.1"], "targetRef": target}]
    parsed = parse_slice(as_json(slice_object("web", endpoints)))
    assert isinstance(parsed, SliceChanged)
    assert parsed.slice
    assert [each.own_pod for each in parsed.slice.endpoints] == [own]
