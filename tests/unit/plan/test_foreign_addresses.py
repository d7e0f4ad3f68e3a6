"""Which addresses of frontends may be another machine's."""

import dataclasses

import pytest

from ebpfproxy.model.address import format_network, parse_address
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device import ETHERNET, LOOPBACK, Device
from ebpfproxy.model.node import Node
from ebpfproxy.plan.foreign_addresses import Elsewhere, elsewhere, foreign_networks
from tests.support.build import networks

UPLINK = Device(2, "eth0", "", ETHERNET, True, networks=tuple(networks(["192.0.2.0/24", "fd00::/64"])))
STATE = ClusterState(
    {},
    {},
    node=Node("here", external_addresses=(parse_address("203.0.113.1"),)),
    local_networks=frozenset(networks(["127.0.0.0/8", "192.0.2.1/32", "fd00::1/128", "198.18.0.0/15"])),
    devices=(UPLINK,),
    node_addresses=frozenset(map(parse_address, ("192.0.2.1", "203.0.113.1", "203.0.113.2"))),
)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.1", None),  # of this node
        ("fd00::1", None),
        ("203.0.113.1", None),  # of this node by 1:1 NAT
        ("198.19.0.1", None),  # local by a route
        ("203.0.113.2", Elsewhere.OTHER_NODE),
        ("192.0.2.9", Elsewhere.ON_LINK),
        ("fd00::9", Elsewhere.ON_LINK),
        ("10.99.0.1", None),
        ("fd01::1", None),
    ],
)
def test_an_address_is_elsewhere_by_facts(address: str, expected: Elsewhere | None) -> None:
    assert elsewhere(parse_address(address), STATE) is expected


@pytest.mark.parametrize("other", [UPLINK._replace(up=False), UPLINK._replace(link_type=LOOPBACK)])
def test_a_device_without_a_link_has_no_machines(other: Device) -> None:
    state = dataclasses.replace(STATE, devices=(other,))
    assert elsewhere(parse_address("192.0.2.9"), state) is None


def test_the_foreign_networks_are_those_of_links_and_the_addresses_of_other_nodes() -> None:
    found = {format_network(net) for net in foreign_networks(STATE)}
    assert found == {"192.0.2.0/24", "fd00::/64", "203.0.113.2/32"}


def test_a_network_that_is_local_is_not_foreign() -> None:
    inner = UPLINK._replace(networks=tuple(networks(["198.18.5.0/24"])))
    assert not foreign_networks(dataclasses.replace(STATE, devices=(inner,), node_addresses=frozenset()))
