"""Which addresses accept NodePorts."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    contains,
    format_network,
    network,
    network_family,
    parse_address,
)
from ebpfproxy.plan.node_ports import LOOPBACK, node_ports_everywhere, plan_node_ports
from ebpfproxy.plan.service_plan import PlanContext
from tests.support import build
from tests.support.build import CONTEXT, networks

LOCAL = frozenset(
    networks(["127.0.0.0/8", "::1/128", "192.0.2.10/32", "10.1.0.1/32", "2001:db8::10/128", "fe80::1/128"])
)


def answered(*cidrs: str, localhost: bool = True, primary: bool = False, bind: str = "") -> set[str]:
    context = PlanContext(
        "here",
        localhost_node_ports=localhost,
        node_port_cidrs=networks(cidrs),
        node_port_primary=primary,
        bind_address=parse_address(bind) if bind else None,
    )
    addresses = ["192.0.2.10", "10.1.0.1", "2001:db8::10", "fe80::1"]
    return set(map(format_network, plan_node_ports(LOCAL, build.node(addresses=addresses), context)))


def test_without_cidrs_every_local_address_accepts_node_ports() -> None:
    assert answered() == set(map(format_network, LOCAL))


def test_without_localhost_node_ports_loopback_of_both_families_is_left_out() -> None:
    rest = {"192.0.2.10/32", "10.1.0.1/32", "2001:db8::10/128", "fe80::1/128"}
    assert answered(localhost=False) == rest
    assert answered("127.0.0.0/8", "::1/128", localhost=False) == set()


def test_only_local_addresses_in_a_cidr_accept_node_ports() -> None:
    assert answered("192.0.2.0/24", "2001:db8::/32") == {"192.0.2.10/32", "2001:db8::10/128"}


def test_a_family_without_cidr_accepts_node_ports_on_every_local_address() -> None:
    assert answered("192.0.2.0/24") == {"192.0.2.10/32", "::1/128", "2001:db8::10/128", "fe80::1/128"}


def test_a_cidr_of_all_ipv4_addresses_does_not_include_ipv6() -> None:
    assert answered("0.0.0.0/0", "2001:db8::/32") == {
        "127.0.0.0/8",
        "192.0.2.10/32",
        "10.1.0.1/32",
        "2001:db8::10/128",
    }


def test_of_a_local_network_and_a_cidr_the_smaller_one_accepts_node_ports() -> None:
    assert answered("127.0.0.1/32", "::1/128") == {"127.0.0.1/32", "::1/128"}


def test_primary_is_one_address_of_each_family() -> None:
    assert answered(primary=True) == {"192.0.2.10/32", "2001:db8::10/128"}


def test_cidrs_are_added_to_the_primary_addresses() -> None:
    assert answered("127.0.0.0/8", "::1/128", primary=True) == {
        *("127.0.0.0/8", "::1/128"),
        *("192.0.2.10/32", "2001:db8::10/128"),
    }
    assert answered("10.0.0.0/8", primary=True) == {"10.1.0.1/32", "192.0.2.10/32", "2001:db8::10/128"}
    assert answered("0.0.0.0/0", "::/0", primary=True) == answered()


def test_a_family_is_unrestricted_without_cidr_and_primary_or_with_a_cidr_of_everything() -> None:
    for cidrs, primary, everywhere in (
        ((), False, {Family.IPV4, Family.IPV6}),
        (("10.0.0.0/8",), False, {Family.IPV6}),
        ((), True, set()),
        (("0.0.0.0/0",), True, {Family.IPV4}),
    ):
        context = PlanContext("here", node_port_cidrs=networks(cidrs), node_port_primary=primary)
        assert node_ports_everywhere(context) == everywhere


def test_primary_is_the_bind_address_in_its_family() -> None:
    assert answered(primary=True, bind="10.1.0.1") == {"10.1.0.1/32", "2001:db8::10/128"}
    assert answered(primary=True, bind="fe80::1") == {"192.0.2.10/32", "fe80::1/128"}


def test_primary_is_an_external_address_if_the_node_has_no_internal_one() -> None:
    context = dataclasses.replace(CONTEXT, node_port_primary=True)
    outside = dataclasses.replace(
        build.node(addresses=["2001:db8::10"]),
        external_addresses=tuple(map(parse_address, ("192.0.2.10", "fe80::1"))),
    )
    nets = plan_node_ports(LOCAL, outside, context)
    assert set(map(format_network, nets)) == {"192.0.2.10/32", "2001:db8::10/128"}


def test_a_bind_address_does_not_restrict_node_ports_without_primary() -> None:
    assert answered(bind="10.1.0.1") == answered()


def test_a_primary_address_that_is_not_local_is_left_out() -> None:
    assert answered(primary=True, bind="198.51.100.1") == {"2001:db8::10/128"}


def test_while_the_node_is_unknown_there_is_no_primary_address() -> None:
    context = dataclasses.replace(CONTEXT, node_port_primary=True)
    assert plan_node_ports(LOCAL, None, context) == frozenset()


def test_loopback_is_excluded_from_a_local_network_that_contains_it() -> None:
    context = dataclasses.replace(CONTEXT, localhost_node_ports=False)
    nets = plan_node_ports(frozenset(networks(["0.0.0.0/0"])), None, context)
    assert len(nets) == 8
    assert not _answers(nets, parse_address("127.1.2.3"))
    for text in ("126.255.255.255", "128.0.0.0", "8.8.8.8"):
        assert _answers(nets, parse_address(text))


def _answers(nets: frozenset[Network], address: Address) -> bool:
    of = network_family(Network(address, 128))
    return any(contains(net, address) for net in nets if network_family(net) is of)


_ADDRESSES = st.sampled_from(
    ["127.0.0.1", "127.9.9.9", "192.0.2.10", "192.0.3.1", "::1", "::2", "2001:db8::10", "fe80::1"]
).map(parse_address)


@st.composite
def _networks(draw: st.DrawFn) -> Network:
    address = draw(_ADDRESSES)
    four = network_family(Network(address, 128)) is Family.IPV4
    return network(address, draw(st.integers(96 if four else 0, 128)))


@given(st.frozensets(_networks(), max_size=4), st.lists(_networks(), max_size=3), st.booleans(), _ADDRESSES)
def test_an_address_accepts_node_ports_if_and_only_if_it_is_local_and_selected(
    local: frozenset[Network], cidrs: list[Network], localhost: bool, address: Address
) -> None:
    context = dataclasses.replace(CONTEXT, node_port_cidrs=tuple(cidrs), localhost_node_ports=localhost)
    of = network_family(Network(address, 128))
    ours = [cidr for cidr in cidrs if network_family(cidr) is of]
    wanted = _answers(local, address) and (not ours or any(contains(cidr, address) for cidr in ours))
    if not localhost and _answers(frozenset(LOOPBACK), address):
        wanted = False
    assert _answers(plan_node_ports(local, None, context), address) == wanted
