"""default/kubernetes keeps its last endpoints, whatever becomes of its slices."""

import dataclasses

from ebpfproxy.model.address import Family, Protocol, parse_address
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.endpoints import API_SERVER, keep_last_endpoints
from ebpfproxy.plan.service_plan import NoEndpointAction, PlannedEndpoint, ServicePortPlan

NAME = ServicePortName(*API_SERVER, "https", Protocol.TCP)
EMPTY = ServicePortPlan(NAME, Family.IPV4, (), (), NoEndpointAction.REJECT)


def serving(*addresses: str) -> ServicePortPlan:
    endpoints = tuple(PlannedEndpoint(parse_address(a), 6443, True, False, False) for a in addresses)
    return dataclasses.replace(EMPTY, endpoints=endpoints)


def test_the_last_endpoints_stay_when_all_go() -> None:
    """Regression: calico ee3dc51152."""
    assert keep_last_endpoints((EMPTY,), lambda _: serving("192.0.2.1")) == (serving("192.0.2.1"),)


def test_endpoints_that_only_drain_are_none() -> None:
    draining = tuple(e._replace(cluster=False) for e in serving("192.0.2.2").endpoints)
    plan = dataclasses.replace(EMPTY, endpoints=draining)
    assert keep_last_endpoints((plan,), lambda _: serving("192.0.2.1")) == (serving("192.0.2.1"),)


def test_new_endpoints_take_over() -> None:
    assert keep_last_endpoints((serving("192.0.2.2"),), lambda _: serving("192.0.2.1")) == (
        serving("192.0.2.2"),
    )


def test_a_service_that_never_had_endpoints_has_none() -> None:
    assert keep_last_endpoints((EMPTY,), lambda _: None) == (EMPTY,)
    assert keep_last_endpoints((EMPTY,), lambda _: EMPTY) == (EMPTY,)
