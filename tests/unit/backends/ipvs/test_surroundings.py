"""What plans in mode ipvs depend on besides plans: which of them to render again after a change."""

import dataclasses
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ipvs.backend import LIMITED, IpvsBackend
from ebpfproxy.backends.ipvs.entries import IpvsSettings, Server, ServerEntry
from ebpfproxy.linux.ipvs.messages import Method
from ebpfproxy.linux.netlink import local_addresses, routing
from ebpfproxy.model.address import Address, Family, Network, parse_address
from ebpfproxy.plan.service_plan import ServicePortPlan
from tests.unit.backends.ipvs.test_forwarding import DIRECT, NAT, THERE, planned

PLAN = planned(DIRECT)


@pytest.fixture
def gateways(monkeypatch: pytest.MonkeyPatch) -> set[Address]:
    """The addresses behind gateways, and the node has none of its own."""
    found: set[Address] = set()
    gateway = parse_address("192.0.2.1")

    def route(address: Address) -> routing.Route:
        return routing.Route(2, None, gateway if address in found else None)

    monkeypatch.setattr(routing, "route_to", route)
    monkeypatch.setattr(local_addresses, "read", frozenset)
    return found


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[IpvsBackend]:
    """A backend that serves both families, without a kernel."""
    made = IpvsBackend(IpvsSettings())
    monkeypatch.setattr(type(made._families), "served", property(lambda _: tuple(Family)))
    yield made
    made.close()


def methods(backend: IpvsBackend, plan: ServicePortPlan) -> set[Method]:
    entries = backend.render((plan,), None)
    return {
        real.method
        for key, entry in entries.items()
        if isinstance(key, Server) and isinstance(entry, ServerEntry)
        for real in entry.reals
    }


def test_a_plan_is_outdated_once_its_routes_have_changed(
    backend: IpvsBackend, gateways: set[Address]
) -> None:
    surroundings = backend._surroundings
    assert methods(backend, PLAN) == {Method.DIRECT}
    gateways.add(parse_address(THERE[Family.IPV4]))
    assert backend.outdated({PLAN.key}) == []  # not yet read again
    surroundings.forget()
    assert backend.outdated({PLAN.key}) == [PLAN.key]
    assert methods(backend, PLAN) == {Method.MASQUERADE}
    surroundings.forget()
    assert backend.outdated({PLAN.key}) == []
    gateways.clear()
    surroundings.forget()
    assert backend.outdated({PLAN.key}) == [PLAN.key]
    assert methods(backend, PLAN) == {Method.DIRECT}


def test_removed_and_translated_plans_are_never_outdated(
    backend: IpvsBackend, gateways: set[Address]
) -> None:
    methods(backend, PLAN)
    gateways.add(parse_address(THERE[Family.IPV4]))
    backend._surroundings.forget()
    assert backend.outdated(set()) == []
    methods(backend, PLAN)
    methods(backend, planned(NAT))  # the Service no longer asks for direct routing
    gateways.clear()
    backend._surroundings.forget()
    assert backend.outdated({PLAN.key}) == []


def test_limits_are_reported_once_until_they_change_or_the_service_is_removed(
    backend: IpvsBackend, gateways: set[Address], caplog: pytest.LogCaptureFixture
) -> None:
    def reports() -> int:
        return [record.message for record in caplog.records].count(LIMITED)

    port = PLAN.name._replace(port="other")
    other_port = dataclasses.replace(PLAN, name=port)
    gateways.add(parse_address(THERE[Family.IPV4]))
    backend._surroundings.forget()
    backend.render((PLAN, other_port, PLAN), None)
    assert reports() == 1
    backend.outdated({PLAN.key, other_port.key})
    backend.render((PLAN, other_port), None)
    assert reports() == 1
    backend._surroundings.forget()
    backend.outdated({other_port.key})
    backend.render((PLAN,), None)
    assert reports() == 1  # the other port still has the limit
    backend._surroundings.forget()
    backend.outdated(set())
    backend.render((PLAN,), None)
    assert reports() == 2
    gateways.clear()
    backend._surroundings.forget()
    backend.render((PLAN,), None)
    gateways.add(parse_address(THERE[Family.IPV4]))
    backend._surroundings.forget()
    backend.render((PLAN,), None)
    assert reports() == 3


def test_local_addresses_are_compared(backend: IpvsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a Service is local, so that its packets must be translated."""
    methods(backend, PLAN)
    address = PLAN.frontends[0].frontend.address
    monkeypatch.setattr(local_addresses, "read", lambda: frozenset({Network(address, 128)}))
    backend._surroundings.forget()
    assert backend.outdated({PLAN.key}) == [PLAN.key]
    assert methods(backend, PLAN) == {Method.MASQUERADE}
