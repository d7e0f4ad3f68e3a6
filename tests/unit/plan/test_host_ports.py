"""Host ports of pods as plans, and their claims beside those of Services."""

import dataclasses

import pytest

from ebpfproxy.model.address import Address, Family, Protocol, format_address, parse_address
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.pod import HostPort, Pod
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.claims import Claims
from ebpfproxy.plan.frontends import plan_name, plan_service
from ebpfproxy.plan.host_ports import elsewhere, is_host_port, name_of, plan_host_ports
from ebpfproxy.plan.service_plan import FrontendKind, Scope, ServicePortPlan
from tests.support.build import CONTEXT, endpoint, name, networks, port, service, slice_of

SERVING = dataclasses.replace(CONTEXT, host_ports=True)
LOCAL = networks(["127.0.0.0/8", "192.0.2.10/32", "192.0.2.11/32"])
V4, V6 = parse_address("10.1.0.1"), parse_address("fd01::1")


def pod(*ports: HostPort, called: str = "web-0", addresses: tuple[Address, ...] = (V4, V6)) -> Pod:
    return Pod(name(called), addresses, ports)


def on(host: str, number: int = 80, protocol: Protocol = Protocol.TCP) -> HostPort:
    return HostPort(parse_address(host) if host else None, number, protocol, 8080)


def frontends(*plans: ServicePortPlan) -> list[str]:
    return [str(each.frontend) for plan in plans for each in plan.frontends]


def test_a_host_port_is_a_node_port_with_policy_local_and_one_endpoint() -> None:
    first, second = plan_host_ports(pod(on("")), None, LOCAL, CONTEXT)
    assert (first.family, second.family) == (Family.IPV4, Family.IPV6)
    assert str(first.name) == "default/pod/web-0:hostport-80"
    assert frontends(first, second) == ["0.0.0.0:80/TCP", "[::]:80/TCP"]
    (frontend,) = first.frontends
    assert frontend.kind is FrontendKind.NODE_PORT
    assert (frontend.outside.scope, frontend.outside.masquerade) == (Scope.LOCAL, False)
    (target,) = first.endpoints
    assert (format_address(target.address), target.port, target.on_node) == ("10.1.0.1", 8080, True)


def test_a_host_ip_is_served_in_its_family_only() -> None:
    (plan,) = plan_host_ports(pod(on("192.0.2.10")), None, LOCAL, CONTEXT)
    assert frontends(plan) == ["192.0.2.10:80/TCP"]
    assert plan.frontends[0].kind is FrontendKind.EXTERNAL_IP


def test_an_unspecified_host_ip_is_every_address_of_its_family() -> None:
    assert frontends(*plan_host_ports(pod(on("::")), None, LOCAL, CONTEXT)) == ["[::]:80/TCP"]


def test_a_port_at_several_addresses_and_protocols_has_plans_with_different_names() -> None:
    ports = on("192.0.2.10"), on("192.0.2.11"), on("", protocol=Protocol.UDP)
    plans = plan_host_ports(pod(*ports, addresses=(V4,)), None, LOCAL, CONTEXT)
    assert len({plan.key for plan in plans}) == 3
    assert sorted(frontends(*plans)) == ["0.0.0.0:80/UDP", "192.0.2.10:80/TCP", "192.0.2.11:80/TCP"]


def test_long_names_of_pods_are_shortened_and_differ() -> None:
    left, right = (NamespacedName("default", "a" * 250 + last) for last in "xy")
    assert len(name_of(left).name) == len(name_of(right).name) == 63
    assert name_of(left) != name_of(right)


def test_host_ports_are_planned_only_if_they_are_served() -> None:
    only = pod(on(""))
    state = ClusterState({}, {}, pods={name_of(only.name): only})
    assert len(plan_name(name_of(only.name), state, SERVING)) == 2
    assert plan_name(name_of(only.name), state, CONTEXT) == ()


@pytest.mark.parametrize("first", ["service", "pod"])
def test_a_service_keeps_a_frontend_that_a_pod_claims(first: str) -> None:
    of = service("zzz", port(80, node_port=30080))
    updates = {
        "service": (of.name, plan_service(of, [slice_of("zzz", endpoint())], None, CONTEXT)),
        "pod": (name_of(name("web-0")), plan_host_ports(pod(on("", 30080)), None, LOCAL, CONTEXT)),
    }
    claims = Claims()
    for each in (first, *(updates.keys() - {first})):
        claims.update(*updates[each])
    served = {text for plan in claims.plans.values() if is_host_port(plan.name) for text in frontends(plan)}
    assert served == {"[::]:30080/TCP"}, "the Service has no IPv6 address"


@pytest.mark.parametrize("host", ["8.8.8.8", "169.254.169.254", "192.0.2.12", "2001:db8::1"])
def test_a_host_ip_of_another_machine_is_not_served(host: str) -> None:
    of = pod(on(host), on("", 81))
    assert frontends(*plan_host_ports(of, None, LOCAL, CONTEXT)) == ["0.0.0.0:81/TCP", "[::]:81/TCP"]
    assert elsewhere(of, LOCAL) == (on(host),)
    assert elsewhere(pod(on(""), on("::"), on("127.0.0.1")), LOCAL) == ()
