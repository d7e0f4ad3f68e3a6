"""Entries for the tests of ServiceTable, and helpers to write and apply them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from socket import htons

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import FrontendEntry, ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.record import Record
from ebpfproxy.backends.ebpf.services.table import ServiceTable
from ebpfproxy.model.address import Family, Protocol, parse_address, parse_network
from ebpfproxy.plan.planned_endpoints import ROW, PlannedEndpoints
from tests.support.clock import Clock

Entries = dict[ServicePortKey, ServicePortEntry]

BOTH = abi.ENDPOINT_LISTED | abi.ENDPOINT_CLUSTER | abi.ENDPOINT_LOCAL
CLUSTER = abi.ENDPOINT_LISTED | abi.ENDPOINT_CLUSTER
LISTED = abi.ENDPOINT_LISTED


def wipe(maps: Maps) -> None:
    hashes = "services", "service_names", "affinity", "source_ranges", "frontend_addresses"
    names = *hashes, "connections", "new_endpoints", "tunnels", "tunnel_endpoints"
    for name in names:
        for key, _ in list(maps[name].items()):
            maps[name].delete(key)
    for name in ("slots", "endpoints", "service_ports"):
        with contextlib.closing(maps[name].mapped()) as memory:
            memory[:] = bytes(len(memory))


@contextlib.contextmanager
def opened(maps: Maps, clock: Callable[[], float] | None = None) -> Iterator[ServiceTable]:
    """A table as in a new process, which knows no entries until it has read the maps."""
    table = ServiceTable(maps, clock or Clock())
    try:
        yield table
    finally:
        table.close()


def record_of(table: ServiceTable, of: ServicePortKey) -> Record | None:
    """What the table believes to have written of a ServicePort."""
    return table._records.get(of)


def in_force(table: ServiceTable, of: ServicePortKey) -> ServicePortEntry | None:
    """The entry that the table believes to have written."""
    record = record_of(table, of)
    return record.entry if record else None


def key(name: str, protocol: Protocol = Protocol.TCP, family: Family = Family.IPV4) -> ServicePortKey:
    return ServicePortKey(f"default/{name}", protocol, family)


def frontend(ip: str, port: int = 80, flags: int = 0, protocol: Protocol = Protocol.TCP) -> FrontendEntry:
    return FrontendEntry(parse_address(ip), port, protocol, 1, flags)


def endpoint(ip: str, flags: int = CLUSTER, port: int = 8080) -> bytes:
    """The row of an endpoint."""
    return ROW.pack(parse_address(ip), htons(port), flags)


def weighted(flags: int, weight: int) -> int:
    """The flags of an endpoint with this weight."""
    return flags | weight << abi.CONSTANTS["ENDPOINT_WEIGHT_SHIFT"]


def packed(*rows: bytes) -> PlannedEndpoints:
    """The endpoints with these rows, in the order of entries."""
    return PlannedEndpoints.packed(b"".join(sorted(rows)))


def rows(of: ServicePortEntry) -> list[bytes]:
    """The rows of an entry's endpoints."""
    return [ROW.pack(*fields) for fields in ROW.iter_unpack(of.endpoints.rows)]


def entry(
    frontends: list[FrontendEntry],
    endpoints: list[bytes],
    affinity: int = 0,
    sources: Iterable[str] = (),
    algorithm: int = abi.ALGORITHM_RANDOM,
) -> ServicePortEntry:
    networks = tuple(sorted(map(parse_network, sources)))
    return ServicePortEntry(tuple(sorted(frontends)), packed(*endpoints), affinity, networks, algorithm)


def bring(table: ServiceTable, actual: Mapping[ServicePortKey, ServicePortEntry], wanted: Entries) -> None:
    """Apply the difference; nothing may be rejected."""
    delta = diff(actual, wanted)
    rejected = table.apply(delta.puts, delta.drops)
    assert not rejected


def exposed(n: int, frontends: int = 1, endpoints: int = 1) -> ServicePortEntry:
    return entry(
        [frontend(f"10.96.{n}.{i}") for i in range(frontends)],
        [endpoint(f"10.1.{n}.{i}") for i in range(endpoints)],
    )


WEB = entry([frontend("10.96.0.1"), frontend("203.0.113.1")], [endpoint("10.1.0.1"), endpoint("10.1.0.2")])
API = entry(
    [
        frontend("10.96.0.2", flags=abi.SERVICE_REJECT),
        frontend("10.96.0.9", flags=abi.SERVICE_EXTERNAL_LOCAL),
    ],
    [endpoint("10.1.0.1"), endpoint("10.1.0.3", BOTH), endpoint("10.1.0.4", LISTED)],
    affinity=600,
)
GUARDED = entry(
    [frontend("10.96.0.5"), frontend("203.0.113.5", flags=abi.SERVICE_RESTRICTED)],
    [endpoint("10.1.0.5")],
    sources=["198.51.100.0/24", "198.51.0.0/16", "192.0.2.7/32"],
)
DNS = entry([frontend("fd00::53", 53, protocol=Protocol.UDP)], [endpoint("fd01::1", port=53)])
TURNS = entry(
    [frontend("10.96.0.6"), frontend("203.0.113.6", flags=abi.SERVICE_EXTERNAL_LOCAL)],
    [endpoint("10.1.0.1"), endpoint("10.1.0.2", BOTH)],
    algorithm=abi.ALGORITHM_ROUND_ROBIN,
)
WEIGHTED = entry([frontend("10.96.0.7")], [endpoint("10.1.0.1"), endpoint("10.1.0.2", weighted(CLUSTER, 3))])
LEAST = entry(
    [frontend("10.96.0.3")],
    [endpoint("10.1.0.1"), endpoint("10.1.0.4", weighted(CLUSTER, 2))],
    algorithm=abi.ALGORITHM_LEAST_CONNECTIONS,
)
SEVERAL: Entries = {
    key("least"): LEAST,
    key("turns"): TURNS,
    key("weighted"): WEIGHTED,
    key("web"): WEB,
    key("api"): API,
    key("dns", Protocol.UDP, Family.IPV6): DNS,
    key("guarded"): GUARDED,
    key("guarded6", family=Family.IPV6): entry(
        [frontend("fd00::5", flags=abi.SERVICE_RESTRICTED)], [], sources=["2001:db8::/32", "::/0"]
    ),
    key("idle"): entry([frontend("10.96.0.4", flags=abi.SERVICE_REJECT)], []),
    key("unexposed"): entry([], [endpoint("10.1.0.9")]),
}
