"""Plans become entries: what each flag stands for, and that nothing else has a part in it."""

import dataclasses
import itertools
import sys
from socket import htons

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import (
    ATTACHED,
    DeviceKey,
    FrontendEntry,
    HookKey,
    Key,
    ServicePortEntry,
    ServicePortKey,
    has_loopback,
    render,
)
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.model.address import Address, Family, Network, Protocol, contains, parse_address, parse_network
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service, ServicePortName
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.planned_endpoints import ROW
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    NodePlan,
    NoEndpointAction,
    PlanContext,
    PlannedEndpoint,
    PlannedEndpoints,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.support.strategies import CONTEXTS, NODES, exposed_services

CLUSTER, LOCAL = PolicyResult(Scope.CLUSTER, False), PolicyResult(Scope.LOCAL, False)
PLAIN = FrontendPlan(
    Frontend(parse_address("10.96.0.10"), 80, Protocol.TCP),
    FrontendKind.CLUSTER_IP,
    CLUSTER,
    CLUSTER,
    CLUSTER,
)
NAME = ServicePortName("default", "web", "http", Protocol.TCP)


def plan(
    *frontends: FrontendPlan, no_endpoint_action: NoEndpointAction = NoEndpointAction.DROP
) -> ServicePortPlan:
    return ServicePortPlan(NAME, Family.IPV4, frontends, PlannedEndpoints(), no_endpoint_action)


def _row(address: str, flags: int) -> bytes:
    return abi.ENDPOINT.pack(parse_address(address), htons(8080), flags, 0)[: ROW.size]


def flags_of(frontend: FrontendPlan, no_endpoint_action: NoEndpointAction = NoEndpointAction.DROP) -> int:
    (entry,) = render((plan(frontend, no_endpoint_action=no_endpoint_action),), None, ()).values()
    assert isinstance(entry, ServicePortEntry)
    return entry.frontends[0].flags


def test_a_plain_frontend_has_no_flags() -> None:
    assert flags_of(PLAIN) == 0


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ({"pod": LOCAL}, abi.SERVICE_INTERNAL_LOCAL),
        ({"outside": LOCAL}, abi.SERVICE_EXTERNAL_LOCAL),
        ({"pod": PolicyResult(Scope.CLUSTER, True)}, abi.SERVICE_MASQUERADE_POD),
        ({"node": PolicyResult(Scope.CLUSTER, True)}, abi.SERVICE_MASQUERADE_NODE),
        ({"outside": PolicyResult(Scope.CLUSTER, True)}, abi.SERVICE_MASQUERADE_OUTSIDE),
        ({"restricted": True}, abi.SERVICE_RESTRICTED | abi.SERVICE_NODE_ADMITTED),
        ({"restricted": True, "node_admitted": False}, abi.SERVICE_RESTRICTED),
    ],
)
def test_each_property_of_a_frontend_has_its_flag(change: dict[str, object], flags: int) -> None:
    assert flags_of(PLAIN._replace(**change)) == flags  # type: ignore[arg-type]


def test_a_service_without_any_endpoint_gets_the_reject_flag() -> None:
    assert flags_of(PLAIN, NoEndpointAction.REJECT) == abi.SERVICE_REJECT


@pytest.mark.parametrize("kind", FrontendKind)
def test_the_kinds_are_those_of_the_header(kind: FrontendKind) -> None:
    (entry,) = render((plan(PLAIN._replace(kind=kind)),), None, ()).values()
    assert isinstance(entry, ServicePortEntry)
    assert abi.KINDS[entry.frontends[0].kind] == kind.value


def test_an_entry_contains_the_complete_plan() -> None:
    node_port = FrontendPlan(
        Frontend(parse_address("0.0.0.0"), 30080, Protocol.TCP),
        FrontendKind.NODE_PORT,
        CLUSTER,
        CLUSTER,
        LOCAL,
    )
    endpoints = (
        PlannedEndpoint(parse_address("10.1.0.1"), 8080, cluster=True, local=False, on_node=False),
        PlannedEndpoint(parse_address("10.1.0.2"), 8080, cluster=False, local=True, on_node=True),
        PlannedEndpoint(parse_address("10.1.0.3"), 8080, cluster=False, local=False, on_node=False),
        PlannedEndpoint(parse_address("10.1.0.4"), 8080, cluster=False, local=False, on_node=None),
    )
    full = dataclasses.replace(
        plan(PLAIN, node_port), endpoints=PlannedEndpoints(endpoints), affinity_timeout=600
    )
    assert render((full,), None, ()) == {
        ServicePortKey("default/web:http", Protocol.TCP, Family.IPV4): ServicePortEntry(
            (
                FrontendEntry(parse_address("0.0.0.0"), 30080, 6, 2, abi.SERVICE_EXTERNAL_LOCAL),
                FrontendEntry(parse_address("10.96.0.10"), 80, 6, 1, 0),
            ),
            PlannedEndpoints.packed(
                b"".join(
                    (
                        _row("10.1.0.1", abi.ENDPOINT_LISTED | abi.ENDPOINT_CLUSTER),
                        _row("10.1.0.2", abi.ENDPOINT_LISTED | abi.ENDPOINT_LOCAL | abi.ENDPOINT_ON_NODE),
                        _row("10.1.0.3", abi.ENDPOINT_LISTED),
                        _row("10.1.0.4", abi.ENDPOINT_LISTED | abi.CONSTANTS["ENDPOINT_NODE_UNKNOWN"]),
                    )
                )
            ),
            600,
        )
    }


def test_without_frontends_the_affinity_timeout_is_0() -> None:
    """The maps hold the timeout with each frontend: a timeout without a frontend cannot be read back and
    would always look like drift."""
    lost = dataclasses.replace(plan(), affinity_timeout=600)
    (entry,) = render((lost,), None, ()).values()
    assert entry == ServicePortEntry((), PlannedEndpoints(), 0)


def test_one_port_number_of_two_protocols_is_two_entries() -> None:
    """Regression, kubernetes-sigs/kpng: a key without the protocol made one of 53/TCP and 53/UDP."""
    tcp = plan(PLAIN)
    udp = dataclasses.replace(tcp, name=NAME._replace(protocol=Protocol.UDP))
    assert len(render((tcp, udp), None, ())) == 2


def test_both_families_of_a_port_are_two_entries() -> None:
    assert len(render((plan(), dataclasses.replace(plan(), family=Family.IPV6)), None, ())) == 2


def test_no_plans_render_no_entries() -> None:
    assert render((), None, SOCKET_HOOKS) == {}


def test_a_node_has_entries_for_every_hook_and_network() -> None:
    host, loopback = parse_network("192.0.2.10/32"), parse_network("127.0.0.0/8")
    node = NodePlan(frozenset({host, loopback}), frozenset({host}))
    wanted: dict[Key, object] = {HookKey(hook.name): ATTACHED for hook in SOCKET_HOOKS}
    wanted[host] = abi.NETWORK_LOCAL | abi.NETWORK_NODE_PORTS
    wanted[loopback] = abi.NETWORK_LOCAL
    assert render((), node, SOCKET_HOOKS) == wanted


def test_an_address_inside_a_node_port_network_has_the_node_port_flag() -> None:
    """The longest match decides in the kernel: 127.0.0.1/32 in the local table would hide 127.0.0.0/8."""
    one, all_ = parse_network("127.0.0.1/32"), parse_network("127.0.0.0/8")
    found = render((), NodePlan(frozenset({one, all_}), frozenset({all_})), ())
    assert found[one] == found[all_] == abi.NETWORK_LOCAL | abi.NETWORK_NODE_PORTS


def test_a_network_around_a_node_port_network_has_no_node_port_flag() -> None:
    one, all_ = parse_network("127.0.0.0/32"), parse_network("127.0.0.0/8")
    found = render((), NodePlan(frozenset({one, all_}), frozenset({one})), ())
    assert found == {one: abi.NETWORK_LOCAL | abi.NETWORK_NODE_PORTS, all_: abi.NETWORK_LOCAL}


def test_a_node_port_network_does_not_affect_the_other_family() -> None:
    four, six = parse_network("0.0.0.0/0"), Network(Address(bytes(16)), 0)
    found = render((), NodePlan(frozenset({four}), frozenset({four})), ())
    assert found == {four: abi.NETWORK_LOCAL | abi.NETWORK_NODE_PORTS}
    assert render((), NodePlan(frozenset({six}), frozenset()), ()) == {six: abi.NETWORK_LOCAL}


def test_a_foreign_network_has_its_flag_unless_it_is_local() -> None:
    link, host = parse_network("192.0.2.0/24"), parse_network("192.0.2.10/32")
    node = NodePlan(frozenset({host}), frozenset(), foreign_networks=frozenset({link, host}))
    assert render((), node, ()) == {host: abi.NETWORK_LOCAL, link: abi.NETWORK_FOREIGN}


def many_networks(prefix: int, count: int = 4200) -> frozenset[Network]:
    addresses = (bytes([0xFE, prefix, *bytes(12), *divmod(number, 256)]) for number in range(count))
    return frozenset(Network(Address(address), 128) for address in addresses)


def test_addresses_of_the_node_are_marked() -> None:
    one, other = parse_network("192.0.2.10/32"), parse_network("192.0.2.11/32")
    plan = NodePlan(frozenset({one, other}), addresses=frozenset({one.address}))
    assert render((), plan, ()) == {one: abi.NETWORK_LOCAL | abi.NETWORK_OF_NODE, other: abi.NETWORK_LOCAL}


@pytest.mark.parametrize("answering", [many_networks(0x80), many_networks(0x90)])
def test_the_time_for_local_networks_is_not_quadratic(answering: frozenset[Network]) -> None:
    """A node has an address for each of its Pods and more: that took 8 s for these."""
    local = many_networks(0x80)
    calls = itertools.count()
    sys.setprofile(lambda _frame, event, _function: event in ("call", "c_call") and next(calls))
    try:
        found = render((), NodePlan(local, answering), ())
    finally:
        sys.setprofile(None)
    assert len(found) == len(local | answering)
    assert 0 < next(calls) < 100 * len(found)


NETWORK_TEXTS = (
    "0.0.0.0/0",
    "::/0",
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.1.0.1/32",
    "10.2.0.1/32",
    "fd00::/8",
    "fd00::1/128",
    "::ffff:0:0/90",
)
SOME_NETWORKS = st.frozensets(st.sampled_from([parse_network(text) for text in NETWORK_TEXTS]))


@given(SOME_NETWORKS, SOME_NETWORKS)
def test_a_network_has_the_node_port_flag_exactly_if_a_node_port_network_contains_it(
    local: frozenset[Network], ports: frozenset[Network]
) -> None:
    for net, flags in render((), NodePlan(local, ports), ()).items():
        assert isinstance(net, Network)
        held = any(each.length <= net.length and contains(each, net.address) for each in ports)
        assert flags == abi.NETWORK_LOCAL | (abi.NETWORK_NODE_PORTS if held else 0)


@given(exposed_services(), NODES, CONTEXTS)
def test_each_plan_is_one_entry_independent_of_the_others(
    exposed: tuple[Service, tuple[EndpointSlice, ...]], node: Node | None, context: PlanContext
) -> None:
    service, slices = exposed
    plans = plan_service(service, slices, node, context)
    together = render(plans, None, SOCKET_HOOKS)
    assert len(together) == len(plans)
    alone = [render((each,), None, ()) for each in plans]
    assert all(len(each) == 1 for each in alone)
    merged = {key: entry for each in reversed(alone) for key, entry in each.items()}
    assert merged == together == render(reversed(plans), None, SOCKET_HOOKS)
    for entry in together.values():
        assert isinstance(entry, ServicePortEntry)
        assert list(entry.frontends) == sorted(set(entry.frontends))
        assert list(entry.endpoints) == sorted(set(entry.endpoints))


@given(st.sets(st.integers(0, 5), max_size=6), st.sets(st.integers(0, 5), max_size=6))
def test_the_nodes_entries_do_not_depend_on_the_order_of_sets(one: set[int], two: set[int]) -> None:
    texts = ("10.0.0.0/8", "10.0.0.1/32", "192.0.2.0/24", "::/0", "fd00::1/128", "127.0.0.0/8")
    local = [parse_network(texts[i]) for i in sorted(one)]
    ports = [parse_network(texts[i]) for i in sorted(two)]
    there = NodePlan(frozenset(local), frozenset(ports))
    back = NodePlan(frozenset(reversed(local)), frozenset(reversed(ports)))
    assert render((), there, ()) == render((), back, ())
    assert render((), there, ()).keys() == {*local, *ports}


def test_keys_are_readable_in_the_log() -> None:
    assert str(PLAIN.frontend) == "10.96.0.10:80/TCP"
    assert str(ServicePortKey("default/web:http", Protocol.TCP, Family.IPV4)) == "default/web:http/TCP/IPv4"
    assert str(HookKey("connect4")) == "connect4"
    assert str(parse_network("10.0.0.0/8")) == "10.0.0.0/8"


def test_only_loopback_itself_is_taken_for_loopback() -> None:
    """Its programs do not tell: any device may have lost its ingress program."""
    assert not has_loopback([DeviceKey(2, "eth0")])
    assert has_loopback([DeviceKey(2, "eth0"), DeviceKey(1, "lo")])


@pytest.mark.parametrize(
    ("other", "is_refused"), [("10.0.0.0/8", False), ("10.96.0.0/12", False), ("10.100.0.0/16", True)]
)
def test_no_address_that_a_machine_may_have_is_refused(other: str, is_refused: bool) -> None:
    """The longest match decides, so a network within the ServiceCIDR has an entry of its own."""
    cidr, net = parse_network("10.96.0.0/12"), parse_network(other)
    refused = {cidr: abi.NETWORK_SERVICE_CIDR} if is_refused else {}
    foreign = NodePlan(service_cidrs=frozenset({cidr}), foreign_networks=frozenset({net}))
    assert render([], foreign, ()) == {net: abi.NETWORK_FOREIGN} | refused
    local = NodePlan(service_cidrs=frozenset({cidr}), local_networks=frozenset({net}))
    assert render([], local, ()) == {net: abi.NETWORK_LOCAL} | refused
