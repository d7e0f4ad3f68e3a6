"""The endpoints of Services with direct server return, in `tunnels` and `tunnel_endpoints`."""

import struct
from collections.abc import Callable

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.model.address import Address, parse_address
from tests.kernel.service_table.samples import CLUSTER, WEB, bring, endpoint, entry, frontend, key, opened

pytestmark = pytest.mark.kernel

ON_NODE = CLUSTER | abi.ENDPOINT_ON_NODE
NODE, OTHER_NODE = parse_address("192.0.2.20"), parse_address("2001:db8::20")
_U32 = struct.Struct("=I")


def tunneled(*nodes: Address | None) -> ServicePortEntry:
    """Endpoints 10.1.0.1 and so on. Those without a node are on this node."""
    rows = [endpoint(f"10.1.0.{n}", CLUSTER if node else ON_NODE) for n, node in enumerate(nodes, start=1)]
    flags = abi.SERVICE_DSR if any(nodes) else 0
    made = entry([frontend("10.96.0.1", flags=flags)], rows)
    return made._replace(tunnels=nodes)


BOTH = tunneled(NODE, None, OTHER_NODE)


def targets(maps: Maps) -> dict[Address, Address | None]:
    """The address of each endpoint that has an entry, with its node; None for one on this node."""
    addresses = {}
    with maps["endpoints"].mapped() as memory:
        for id_ in range(maps["endpoints"].shape.max_entries):
            addresses[id_] = Address(abi.ENDPOINT.unpack_from(memory, id_ * abi.ENDPOINT.size)[0])
    found: dict[Address, Address | None] = {}
    for id_key, node in maps["tunnels"].items():
        found[addresses[_U32.unpack(id_key)[0]]] = Address(node)
    for packed, id_value in maps["tunnel_endpoints"].items():
        address = Address(abi.TUNNEL_ENDPOINT.unpack(packed)[0])
        assert addresses[_U32.unpack(id_value)[0]] == address
        found[address] = None
    return found


def at(*nodes: Address | None) -> dict[Address, Address | None]:
    return {parse_address(f"10.1.0.{n}"): node for n, node in enumerate(nodes, start=1)}


def test_endpoints_are_written_and_read_back(roomy: Maps) -> None:
    with opened(roomy) as table:
        bring(table, {}, {key("web"): BOTH})
        assert targets(roomy) == at(NODE, None, OTHER_NODE)
        assert all(table.check())
        assert table.read() == {key("web"): BOTH}
    with opened(roomy) as fresh:
        assert fresh.read() == {key("web"): BOTH}
        assert all(fresh.check())


@pytest.mark.parametrize(
    "after",
    [tunneled(OTHER_NODE, None), tunneled(None, None), tunneled(NODE, NODE, NODE, NODE), tunneled(NODE)],
    ids=["moved", "here", "more", "fewer"],
)
def test_changes_are_written(roomy: Maps, after: ServicePortEntry) -> None:
    with opened(roomy) as table:
        bring(table, {}, {key("web"): BOTH})
        bring(table, {key("web"): BOTH}, {key("web"): after})
        assert targets(roomy) == at(*after.tunnels)
        assert all(table.check())
        assert table.read() == {key("web"): after}


@pytest.mark.parametrize("after", [{}, {key("web"): WEB}], ids=["deleted", "without direct server return"])
def test_nothing_stays_behind(roomy: Maps, after: dict[object, ServicePortEntry]) -> None:
    with opened(roomy) as table:
        bring(table, {}, {key("web"): BOTH})
        bring(table, {key("web"): BOTH}, after)  # type: ignore[arg-type]
        assert targets(roomy) == {}
        assert all(table.check())
        assert table.read() == after


def _first(maps: Maps, name: str) -> bytes:
    return next(iter(dict(maps[name].items())))


DAMAGES: dict[str, Callable[[Maps], object]] = {
    "a node gone": lambda maps: maps["tunnels"].delete(_first(maps, "tunnels")),
    "another node": lambda maps: maps["tunnels"].update(_first(maps, "tunnels"), abi.TUNNEL.pack(bytes(16))),
    "a node too many": lambda maps: maps["tunnels"].update(_U32.pack(99), abi.TUNNEL.pack(NODE)),
    "an endpoint gone": lambda maps: maps["tunnel_endpoints"].delete(_first(maps, "tunnel_endpoints")),
    "another id": lambda maps: maps["tunnel_endpoints"].update(
        _first(maps, "tunnel_endpoints"), _U32.pack(98)
    ),
    "an endpoint too many": lambda maps: maps["tunnel_endpoints"].update(
        abi.TUNNEL_ENDPOINT.pack(NODE, 80, 0, 7), _U32.pack(1)
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_changes_by_another_program_are_found_and_repaired(roomy: Maps, damage: str) -> None:
    with opened(roomy) as table:
        bring(table, {}, {key("web"): BOTH})
        DAMAGES[damage](roomy)
        assert not all(table.check())
        bring(table, table.read(), {key("web"): BOTH})
        assert targets(roomy) == at(NODE, None, OTHER_NODE)
        assert all(table.check())
