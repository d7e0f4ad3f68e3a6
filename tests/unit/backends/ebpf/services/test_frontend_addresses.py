"""The map `frontend_addresses`: the clients that get replies to pings of an address."""

from typing import cast

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.services.frontend_addresses import FrontendAddresses, clients_served
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import parse_address

INSIDE, OUTSIDE = abi.PING_FROM_INSIDE, abi.PING_FROM_OUTSIDE
NOBODY, EVERYBODY = 0, INSIDE | OUTSIDE


class Recorded:
    """A map in memory. `writes`: the address and the clients of each write; None if it was deleted."""

    def __init__(self) -> None:
        self.content: dict[bytes, bytes] = {}
        self.writes: list[tuple[bytes, int | None]] = []

    def items(self) -> list[tuple[bytes, bytes]]:
        return list(self.content.items())

    def update_all(self, entries: list[tuple[bytes, bytes]]) -> None:
        self.content.update(entries)
        self.writes += [(key, _unpack(value)) for key, value in entries]

    def delete(self, key: bytes) -> bool:
        self.writes.append((key, None))
        return self.content.pop(key, None) is not None

    def answered(self) -> dict[bytes, int]:
        return {key: _unpack(value) for key, value in self.content.items()}


def _unpack(value: bytes) -> int:
    (clients,) = abi.FRONTEND_ADDRESS.unpack(value)
    return int(clients)


def entry(ip: str, port: int, internal: int, external: int, flags: int = 0) -> tuple[bytes, bytes]:
    """An entry of `services`. `internal` and `external`: the numbers of endpoints for those clients."""
    ranges = abi.SLOT_RANGE.pack(1, internal), abi.SLOT_RANGE.pack(1, external)
    value = abi.SERVICE.pack(*ranges, 1, 0, flags, abi.CONSTANTS["KIND_LOAD_BALANCER"], 0, 0)
    return abi.SERVICE_KEY.pack(parse_address(ip), port, 6, 0), value


@pytest.fixture
def map_() -> Recorded:
    return Recorded()


@pytest.fixture
def addresses(map_: Recorded) -> FrontendAddresses:
    return FrontendAddresses(cast(Map, map_))


@pytest.mark.parametrize(
    ("internal", "external", "flags", "clients"),
    [
        (2, 2, 0, EVERYBODY),
        (2, 0, abi.SERVICE_EXTERNAL_LOCAL, INSIDE),
        (0, 1, abi.SERVICE_INTERNAL_LOCAL, OUTSIDE),
        (0, 0, abi.SERVICE_EXTERNAL_LOCAL, NOBODY),
        (0, 0, abi.SERVICE_REJECT, EVERYBODY),
        (1, 1, abi.SERVICE_RESTRICTED, EVERYBODY),
    ],
)
def test_a_client_gets_replies_if_it_has_an_endpoint_or_is_rejected(
    internal: int, external: int, flags: int, clients: int
) -> None:
    _, value = entry("203.0.113.1", 80, internal, external, flags)
    assert clients_served(value) == clients


@pytest.mark.parametrize(("external", "flag"), [(1, abi.PING_TO_CLUSTER_IP), (0, 0)])
def test_a_cluster_ip_with_clients_is_marked(external: int, flag: int) -> None:
    ranges = abi.SLOT_RANGE.pack(1, 0), abi.SLOT_RANGE.pack(1, external)
    value = abi.SERVICE.pack(*ranges, 1, 0, 0, abi.CONSTANTS["KIND_CLUSTER_IP"], 0, 0)
    assert clients_served(value) == flag | (OUTSIDE if external else NOBODY)


@pytest.mark.parametrize("ip", ["203.0.113.1", "2001:db8::1"])
def test_clients_are_added_before_a_change_of_services_and_removed_after_it(
    map_: Recorded, addresses: FrontendAddresses, ip: str
) -> None:
    address = parse_address(ip)
    both, outside, inside = entry(ip, 80, 1, 1), entry(ip, 80, 0, 1), entry(ip, 80, 1, 0)
    addresses.extend([both])
    assert map_.answered() == {address: EVERYBODY}
    addresses.settle([both], [])
    addresses.extend([inside])
    assert map_.answered() == {address: EVERYBODY}
    addresses.settle([inside], [])
    assert map_.answered() == {address: INSIDE}
    addresses.extend([outside])
    assert map_.answered() == {address: EVERYBODY}
    addresses.settle([outside], [])
    assert map_.answered() == {address: OUTSIDE}
    addresses.settle([], [outside[0]])
    assert map_.writes == [
        (address, EVERYBODY), (address, INSIDE), (address, EVERYBODY), (address, OUTSIDE), (address, None),
    ]  # fmt: skip


def test_unchanged_clients_are_not_written_again(map_: Recorded, addresses: FrontendAddresses) -> None:
    """A second endpoint serves the same clients."""
    one, two = entry("203.0.113.1", 80, 1, 1), entry("203.0.113.1", 80, 2, 2)
    addresses.read([one])
    addresses.extend([two])
    addresses.settle([two], [])
    addresses.read([two])
    assert map_.writes == [(parse_address("203.0.113.1"), EVERYBODY)]


def test_an_address_has_the_clients_of_all_its_ports(map_: Recorded, addresses: FrontendAddresses) -> None:
    ip = "203.0.113.1"
    http, https = entry(ip, 80, 1, 0), entry(ip, 443, 0, 1)
    addresses.read([http, https, entry("203.0.113.2", 80, 0, 0)])
    assert map_.answered() == {parse_address(ip): EVERYBODY}
    addresses.settle([], [https[0]])
    assert map_.answered() == {parse_address(ip): INSIDE}
    addresses.settle([], [http[0]])
    assert map_.answered() == {}


def test_reading_repairs_what_another_process_wrote(map_: Recorded, addresses: FrontendAddresses) -> None:
    right, wrong, unknown = (parse_address(f"203.0.113.{number}") for number in (1, 2, 3))
    map_.content = {
        right: abi.FRONTEND_ADDRESS.pack(EVERYBODY),
        wrong: abi.FRONTEND_ADDRESS.pack(EVERYBODY),
        unknown: abi.FRONTEND_ADDRESS.pack(EVERYBODY),
    }
    addresses.read([entry("203.0.113.1", 80, 1, 1), entry("203.0.113.2", 80, 1, 0)])
    assert map_.answered() == {right: EVERYBODY, wrong: INSIDE}
    assert map_.writes == [(unknown, None), (wrong, INSIDE)]


def test_node_ports_have_no_address(map_: Recorded, addresses: FrontendAddresses) -> None:
    node_ports = [entry("0.0.0.0", 30080, 1, 1), entry("::", 30080, 1, 1)]
    addresses.read(node_ports)
    addresses.extend(node_ports)
    addresses.settle(node_ports, [])
    addresses.settle([], [key for key, _ in node_ports])
    assert map_.writes == []
