"""Which virtual servers belong to Services, and which to other programs."""

import pytest

from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Key, Member, Set
from ebpfproxy.backends.ipvs.sets import ownership
from ebpfproxy.model.address import Family, Protocol, parse_address, parse_network
from ebpfproxy.plan.service_plan import Frontend

V4 = Family.IPV4
NODE = "192.0.2.1"
FOUND: tuple[Key, ...] = (
    Set(V4, sets.NODE_PORT_IP),
    Member(V4, sets.NODE_PORT_IP, NODE),
    Member(V4, sets.NODE_PORT[Protocol.TCP], "30080"),
    Member(V4, sets.CLUSTER_IP, "10.96.0.1,tcp:80"),
)
KUBE_PROXYS = FOUND[2:]


def frontend(address: str, port: int, protocol: Protocol = Protocol.TCP) -> Frontend:
    return Frontend(parse_address(address), port, protocol)


def is_own(
    frontend_: Frontend,
    found: tuple[Key, ...] = FOUND,
    excluded: tuple[str, ...] = (),
    device: str = "10.96.0.9",
) -> bool:
    owned = ownership(
        found,
        frozenset({parse_address(device)}),
        [parse_network("192.0.2.1/32"), parse_network("127.0.0.0/8")],
        tuple(map(parse_network, excluded)),
    )
    return owned.is_own(frontend_)


@pytest.mark.parametrize(
    ("frontend_", "own"),
    [
        (frontend("10.96.0.1", 80), True),
        (frontend("10.96.0.1", 80, Protocol.UDP), False),
        (frontend("10.96.0.1", 81), False),
        (frontend("10.96.0.9", 81), True),
        (frontend(NODE, 30080), True),
        (frontend(NODE, 30080, Protocol.UDP), False),
        (frontend(NODE, 443), False),
        (frontend("198.51.100.1", 30080), False),
    ],
)
def test_a_virtual_server_is_own_if_it_is_in_a_set_or_its_address_on_kube_ipvs0(
    frontend_: Frontend, own: bool
) -> None:
    assert is_own(frontend_) is own


def test_node_ports_of_kube_proxy_are_own_on_all_addresses_of_the_node() -> None:
    assert is_own(frontend(NODE, 30080), KUBE_PROXYS)
    assert not is_own(frontend(NODE, 30080), KUBE_PROXYS, excluded=("192.0.2.0/24",))


def test_in_excluded_networks_only_exact_frontends_are_own() -> None:
    assert not is_own(frontend("10.96.0.9", 81), excluded=("10.96.0.0/16",))
    assert is_own(frontend("10.96.0.1", 80), excluded=("10.96.0.0/16",))
    assert is_own(frontend(NODE, 30080), excluded=("192.0.2.0/24",))


def test_without_own_objects_no_virtual_server_is_own() -> None:
    assert not is_own(frontend(NODE, 30080), (), device="203.0.113.1")
