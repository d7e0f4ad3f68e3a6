"""Which frontends of users belong to programs of nodes or to the API server."""

import dataclasses
from collections.abc import Iterable

import pytest

from ebpfproxy.config.flag_types import parse_namespace_networks
from ebpfproxy.model.address import Protocol, parse_address
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.model.pod import HostPort, Pod
from ebpfproxy.model.service import Service, ServiceType
from ebpfproxy.plan.endpoints import API_SERVER
from ebpfproxy.plan.frontends import plan_name
from ebpfproxy.plan.host_ports import name_of
from ebpfproxy.plan.protected_addresses import Protected, protected, without_protected
from ebpfproxy.plan.service_plan import FrontendKind, PlanContext, Protection, Role
from tests.support.build import CONTEXT, endpoint, name, networks, node, port, service, slice_of

NODE, SECOND, OTHER, VIP, API = "192.0.2.10", "192.0.2.20", "192.0.2.11", "203.0.113.1", "192.0.2.5"
ANY, ANY_V6 = "0.0.0.0", "::"
TCP, UDP = Protocol.TCP, Protocol.UDP
NODES = dataclasses.replace(CONTEXT, protection=Protection.NODES)
NONE = dataclasses.replace(CONTEXT, protection=Protection.NONE)
EDGE = PlanContext(node_name="", role=Role.EDGE)
HOST_PROCESS, OTHER_NODE = Protected.OF_HOST_PROCESS, Protected.OF_OTHER_NODE
API_PROTECTED = Protected.OF_API_SERVER


def state(*, at: Iterable[tuple[str, int, Protocol]] = (), has_node: bool = True) -> ClusterState:
    """A node with a second address and a VIP on its devices, and a program that listens `at` these."""
    ports = (EndpointPort("https", TCP, 6443),)
    return ClusterState(
        {},
        {API_SERVER: (slice_of(str(API_SERVER), endpoint(API), ports=ports),)},
        node=node(addresses=[NODE]) if has_node else None,
        local_networks=frozenset(networks(["127.0.0.0/8", f"{NODE}/32", f"{SECOND}/32", f"{VIP}/32"])),
        node_addresses=frozenset(map(parse_address, (NODE, OTHER))),
        listening={(protocol, number): frozenset([parse_address(ip)]) for ip, number, protocol in at},
        api_servers=frozenset([(parse_address("192.0.2.6"), 443)]),
    )


def external(address: str, number: int = 22, protocol: Protocol = TCP) -> Service:
    return service("web", port(number, protocol=protocol), external=[address])


def balanced(address: str, number: int = 22) -> Service:
    return service("web", port(number), balancer=[address], type_=ServiceType.LOAD_BALANCER)


@pytest.mark.parametrize(
    ("of", "listening", "expected"),
    [
        (external(NODE), (ANY, 22, TCP), HOST_PROCESS),
        (external(NODE), (NODE, 22, TCP), HOST_PROCESS),
        (external(SECOND), (ANY, 22, TCP), HOST_PROCESS),
        (external(VIP), (VIP, 22, TCP), HOST_PROCESS),
        (external("127.0.0.1"), ("127.0.0.1", 22, TCP), HOST_PROCESS),
        (external("127.0.0.5"), (ANY, 22, TCP), HOST_PROCESS),
        (balanced(NODE), (ANY, 22, TCP), HOST_PROCESS),
        (external(NODE, protocol=UDP), (ANY, 22, UDP), HOST_PROCESS),
        # Another port, protocol, address or family of the program
        (external(NODE, 80), (ANY, 22, TCP), None),
        (external(NODE, protocol=UDP), (ANY, 22, TCP), None),
        (external(NODE), (SECOND, 22, TCP), None),
        (external(NODE), (ANY_V6, 22, TCP), None),
        (external("203.0.113.9"), (ANY, 22, TCP), None),
        # kube-vip and keepalived add the address of a load balancer to a device of the node
        (balanced(VIP), (ANY, 22, TCP), None),
        (balanced(VIP), (VIP, 22, TCP), HOST_PROCESS),
    ],
)
def test_a_program_keeps_its_address_and_port(
    of: Service, listening: tuple[str, int, Protocol], expected: Protected | None
) -> None:
    assert found(of, state(at=[listening])) is expected
    assert found(of, state(at=[listening]), NONE) is None


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (external(API, 6443), API_PROTECTED),
        (external(API, 80), API_PROTECTED),  # modes ipvs and userspace make the address local
        (external(API, 53, UDP), API_PROTECTED),
        (balanced("192.0.2.6", 443), API_PROTECTED),
        (external("192.0.2.7", 6443), None),
    ],
)
def test_the_api_server_keeps_its_address(of: Service, expected: Protected | None) -> None:
    assert found(of, state()) is expected


def test_beside_an_api_server_on_this_node_other_ports_are_served() -> None:
    ports = (EndpointPort("https", TCP, 6443),)
    own = dataclasses.replace(
        state(), slices={API_SERVER: (slice_of(str(API_SERVER), endpoint(NODE), ports=ports),)}
    )
    assert found(external(NODE, 443), own) is None
    assert found(external(NODE, 6443), own) is API_PROTECTED
    assert found(external(NODE, 6443, UDP), own) is None


def test_the_service_of_the_api_server_may_have_its_address() -> None:
    own = dataclasses.replace(external(API, 6443), name=API_SERVER)
    assert found(own, state()) is None


def test_addresses_of_other_nodes_are_served_only_there() -> None:
    assert found(external(OTHER, 80), state(), NODES) is OTHER_NODE
    assert found(external(OTHER, 80), state()) is None
    assert found(external(NODE, 80), state(), NODES) is None


@pytest.mark.parametrize("protection", Protection)
def test_an_edge_never_serves_the_address_of_a_node(protection: Protection) -> None:
    context = dataclasses.replace(EDGE, protection=protection)
    edge = state(at=[(ANY, 22, TCP)], has_node=False)
    assert found(external(OTHER), edge, context) is OTHER_NODE
    assert found(external(VIP), edge, context) is None


def test_only_addresses_that_users_write_are_checked() -> None:
    kept = service("web", port(22, node_port=30022), ips=[NODE], type_=ServiceType.NODE_PORT)
    listening = state(at=[(ANY, 22, TCP), (ANY, 30022, TCP)])
    assert found(kept, listening) is None
    pod = Pod(name("web-0"), (parse_address("10.1.0.1"),), (HostPort(None, 22, TCP, 8080),))
    listening = dataclasses.replace(listening, pods={name_of(pod.name): pod})
    (plan,) = plan_name(name_of(pod.name), listening, dataclasses.replace(CONTEXT, host_ports=True))
    assert protected(plan, listening, CONTEXT) == {}


@pytest.mark.parametrize("context", [CONTEXT, NONE])
@pytest.mark.parametrize(
    ("listening", "expected"),
    [
        ((VIP, 22, TCP), Protected.OF_LOCAL_SERVER),
        ((ANY, 22, TCP), None),
        ((VIP, 23, TCP), None),
        ((VIP, 22, UDP), None),
        ((NODE, 22, TCP), None),
    ],
)
def test_a_program_at_a_cluster_ip_of_the_node_keeps_it(
    listening: tuple[str, int, Protocol], expected: Protected | None, context: PlanContext
) -> None:
    """NodeLocal DNSCache listens at the ClusterIP itself. Others listen at all addresses by habit."""
    known = state(at=[listening])
    of = service("web", port(22), ips=[VIP])
    (plan,) = plan_name(of.name, dataclasses.replace(known, services={of.name: of}), context)
    assert list(protected(plan, known, context).values()) == ([expected] if expected else [])
    elsewhere = dataclasses.replace(known, local_networks=frozenset(networks(["127.0.0.0/8"])))
    assert protected(plan, elsewhere, context) == {}


def test_the_rest_of_the_service_is_served() -> None:
    of = service("web", port(22), external=[NODE, VIP])
    known = dataclasses.replace(state(at=[(NODE, 22, TCP)]), services={of.name: of})
    (plan,) = plan_name(of.name, known, CONTEXT)
    kept = without_protected(plan, known, CONTEXT).frontends
    assert [each.kind for each in kept] == [FrontendKind.CLUSTER_IP, FrontendKind.EXTERNAL_IP]
    assert kept[1].frontend.address == parse_address(VIP)


def found(of: Service, at: ClusterState, context: PlanContext = CONTEXT) -> Protected | None:
    """Why the frontend of the only address that users have written is not served."""
    (plan,) = plan_name(of.name, dataclasses.replace(at, services={of.name: of}), context)
    protections = protected(plan, at, context)
    written = {each.frontend for each in plan.frontends if each.kind is not FrontendKind.CLUSTER_IP}
    assert protections.keys() <= written
    return next(iter(protections.values()), None)


@pytest.mark.parametrize(
    ("permitted", "expected"),
    [
        ("", []),
        ("*=203.0.113.0/24", []),
        ("default=203.0.113.0/24", []),
        ("other=203.0.113.0/24", [Protected.OUTSIDE_NETWORKS]),
        ("*=198.51.100.0/24,default=2001:db8::/64", [Protected.OUTSIDE_NETWORKS]),
    ],
)
@pytest.mark.parametrize("of", [external(VIP), balanced(VIP)])
@pytest.mark.parametrize("protection", Protection)
def test_a_namespace_may_have_addresses_of_its_networks_only(
    of: Service, permitted: str, expected: list[Protected], protection: Protection
) -> None:
    networks_ = parse_namespace_networks([permitted])
    context = dataclasses.replace(CONTEXT, external_networks=networks_, protection=protection)
    of_state = dataclasses.replace(state(), services={of.name: of})
    (plan,) = plan_name(of.name, of_state, context)
    assert list(protected(plan, of_state, context).values()) == expected
    kinds = [each.kind for each in without_protected(plan, of_state, context).frontends]
    assert FrontendKind.CLUSTER_IP in kinds, "it is allocated by the API server"
    assert len(kinds) == len(plan.frontends) - len(expected)
