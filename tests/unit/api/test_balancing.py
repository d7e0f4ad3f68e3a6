"""The annotations of a Service that select its load balancing, and what happens to its connections."""

import json

from ebpfproxy.api.event import ServiceChanged
from ebpfproxy.api.parse import parse_service
from ebpfproxy.model.balancing import DEFAULT_BALANCING, Algorithm, EbpfForwarding, Forwarding
from ebpfproxy.model.service import RemovedEndpoints
from tests.support.build import service_object


def parsed(**annotations: str | None) -> ServiceChanged:
    named = {f"ebpfproxy/{name.replace('_', '-')}": text for name, text in annotations.items()}
    found = parse_service(json.dumps(service_object(annotations=named)).encode())
    assert isinstance(found, ServiceChanged)
    assert found.service
    return found


def test_annotations_select_the_load_balancing() -> None:
    changed = parsed(
        lb_algorithm="maglev",
        endpoint_weights="node:a=2",
        slow_start="30s",
        ipvs_forwarding="tunnel",
        ebpf_forwarding="dsr",
    )
    assert changed.service
    assert not changed.complaints
    balancing = changed.service.balancing
    assert balancing.algorithm is Algorithm.MAGLEV
    assert [(rule.node, rule.weight) for rule in balancing.weights] == [("a", 2)]
    assert balancing.slow_start == 30
    assert balancing.forwarding is Forwarding.TUNNEL
    assert balancing.ebpf_forwarding is EbpfForwarding.DSR


def test_a_service_without_them_has_the_defaults() -> None:
    changed = parsed(lb_algorithm="", slow_start=None)
    assert changed.service
    assert changed.service.balancing is DEFAULT_BALANCING
    assert not changed.complaints


def test_an_invalid_annotation_is_reported_and_counts_as_missing() -> None:
    changed = parsed(
        lb_algorithm="fastest",
        endpoint_weights="a=1",
        slow_start="soon",
        ipvs_forwarding="dr",
        ebpf_forwarding="tunnel",
    )
    assert changed.service
    assert changed.service.balancing is DEFAULT_BALANCING
    begin = [text.partition(":")[0] for text in changed.complaints]
    names = "lb-algorithm", "endpoint-weights", "slow-start", "ipvs-forwarding", "ebpf-forwarding"
    assert begin == [f"annotation ebpfproxy/{name}" for name in names]


def test_zero_overrides_the_default_of_the_node() -> None:
    changed = parsed(slow_start="0s")
    assert changed.service
    assert changed.service.balancing.slow_start == 0


def test_an_annotation_selects_what_happens_to_connections_to_removed_endpoints() -> None:
    found = [parsed(removed_endpoints=text).service for text in ("reset", " keep ", "", None)]
    expected = RemovedEndpoints.RESET, RemovedEndpoints.KEEP, None, None
    assert tuple(each.removed_endpoints for each in found if each) == expected
    changed = parsed(removed_endpoints="drop")
    assert changed.service
    assert changed.service.removed_endpoints is None
    assert list(changed.complaints) == [
        'annotation ebpfproxy/removed-endpoints: "drop" is not one of keep, reset'
    ]


def test_an_annotation_selects_the_percentage_of_rebalancing() -> None:
    found = [parsed(rebalance=text).service for text in ("10", " 0 ", "", None)]
    assert tuple(each.rebalance for each in found if each) == (10, 0, None, None)
    for text in "101", "-1", "ten", "5%":
        changed = parsed(rebalance=text)
        assert changed.service
        assert changed.service.rebalance is None
        assert [each.partition(":")[0] for each in changed.complaints] == ["annotation ebpfproxy/rebalance"]
