"""The count of ports whose policy Local finds nothing here."""

import pytest

from ebpfproxy.model.endpoint import Endpoint
from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.counts import NoLocalEndpoints, no_local_endpoints
from ebpfproxy.plan.frontends import plan_service
from tests.support import build
from tests.support.build import CONTEXT, HERE, endpoint, port, slice_of

LOCAL = TrafficPolicy.LOCAL
INTERNAL = build.service(internal_policy=LOCAL)
EXTERNAL = build.service("web", port(80, node_port=30080), type_=ServiceType.NODE_PORT, external_policy=LOCAL)


@pytest.mark.parametrize(
    ("service", "endpoints", "counted"),
    [
        (INTERNAL, [endpoint()], (1, 0)),
        (EXTERNAL, [endpoint()], (0, 1)),
        (INTERNAL, [endpoint(node=HERE)], (0, 0)),
        (EXTERNAL, [endpoint(node=HERE)], (0, 0)),
        (INTERNAL, [], (0, 0)),
        (build.service(), [endpoint()], (0, 0)),
    ],
)
def test_a_port_counts_where_others_have_endpoints_and_this_node_has_none(
    service: Service, endpoints: list[Endpoint], counted: tuple[int, int]
) -> None:
    plans = plan_service(service, [slice_of("web", *endpoints)], None, CONTEXT)
    assert no_local_endpoints(plans) == NoLocalEndpoints(*counted)


def test_nothing_is_counted_of_nothing() -> None:
    assert no_local_endpoints(()) == NoLocalEndpoints(0, 0)
