"""Reads and checks the maps of services and endpoints, as the BPF programs see them.

It is intentionally independent of ServiceTable, whose results it checks.
"""

import itertools
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import gcd
from socket import ntohs
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, Family, Network, is_unspecified, network

U32 = struct.Struct("=I")
PORT_LINES = (6, 17, 132)  # TCP, UDP, SCTP
TABLES = (abi.ALGORITHM_SOURCE_HASH, abi.ALGORITHM_MAGLEV)
_PAIR = struct.Struct("=2I")
_EMPTY = bytes(1024)


def write_slot(slots: Map, slot: int, content: int) -> None:
    """Write a slot of the map `slots`."""
    pair = U32.pack(slot // 2)
    ids = list(_PAIR.unpack(slots.lookup(pair) or b""))
    ids[slot % 2] = content
    slots.update(pair, _PAIR.pack(*ids))


def read_slot(slots: Map, slot: int) -> int:
    """Return the content of a slot of the map `slots`."""
    return int(_PAIR.unpack(slots.lookup(U32.pack(slot // 2)) or b"")[slot % 2])


class Found(NamedTuple):
    """A value of `services`, unpacked."""

    internal: tuple[int, int]
    external: tuple[int, int]
    id: int
    timeout: int
    flags: int
    kind: int
    algorithm: int
    slow_start: int


class EndpointValue(NamedTuple):
    """A value of `endpoints`, unpacked."""

    address: Address
    port: int
    flags: int
    service: int


FrontendKey = tuple[Address, int, int]


class View:
    """The contents of all these maps at one moment."""

    def __init__(self, maps: Maps) -> None:
        self.services: dict[FrontendKey, Found] = {}
        for key, value in maps["services"].items():
            address, port, protocol, pad = abi.SERVICE_KEY.unpack(key)
            assert pad == 0
            internal, external, *rest = abi.SERVICE.unpack(value)
            found = Found(struct.unpack("=II", internal), struct.unpack("=II", external), *rest)
            self.services[address, ntohs(port), protocol] = found
        self.names: dict[int, ServicePortKey] = {}
        for key, value in maps["service_names"].items():
            text, protocol, version = abi.SERVICE_NAME.unpack(value)
            of = {4: Family.IPV4, 6: Family.IPV6}[version]
            self.names[U32.unpack(key)[0]] = ServicePortKey(text.rstrip(b"\0").decode(), protocol, of)
        self.slots = [slot for value in _values(maps, "slots") for slot in _PAIR.unpack(value)]
        self.endpoints = []
        for value in _values(maps, "endpoints"):
            address, port, flags, service = abi.ENDPOINT.unpack_from(value)
            self.endpoints.append(EndpointValue(address, ntohs(port), flags, service))
        self.sources: dict[int, set[Network]] = defaultdict(set)
        for key, value in maps["source_ranges"].items():
            length, service, source = abi.SOURCE_RANGE_KEY.unpack(key)
            assert U32.unpack(value) == (1,)
            self.sources[service].add(network(source, length - 32))  # unused bits remain
        self.pings: dict[Address, int] = {}
        for key, value in maps["frontend_addresses"].items():
            (self.pings[Address(key)],) = U32.unpack(value)
        self.ports: set[tuple[bool, int, int]] = set()  # of a NodePort, protocol, port
        with maps["service_ports"].mapped() as memory:
            words = memory[: 8 * abi.CONSTANTS["SERVICE_PORT_WORDS"]]
        for at in _bytes_set(words):  # lowest bits are first
            (of_node_ports, line), first = divmod(at // 8192, len(PORT_LINES)), at % 8192 * 8
            bits = (bit for bit in range(8) if words[at] >> bit & 1)
            self.ports |= {(bool(of_node_ports), PORT_LINES[line], first + bit) for bit in bits}

    def listed(self) -> dict[int, EndpointValue]:
        return {id_: each for id_, each in enumerate(self.endpoints) if each.flags & abi.ENDPOINT_LISTED}

    def weight(self, id_: int) -> int:
        return self.endpoints[id_].flags >> abi.CONSTANTS["ENDPOINT_WEIGHT_SHIFT"] or 1

    def in_range(self, range_: tuple[int, int]) -> list[int]:
        """The endpoint ids in a range of slots."""
        first, count = range_
        assert first + count <= len(self.slots), "a range exceeds the map"
        return self.slots[first : first + count]


def _values(maps: Maps, name: str) -> Iterator[bytes]:
    """The values of an array in the order of their numbers, padded to 8 bytes."""
    shape = maps[name].shape
    stride = (shape.value_size + 7) // 8 * 8
    with maps[name].mapped() as memory:
        content = memory[: stride * shape.max_entries]
    return (content[at : at + stride] for at in range(0, len(content), stride))


def _bytes_set(words: bytes) -> Iterator[int]:
    """The positions of bytes that are not 0. Tests read the maps thousands of times, and most parts are
    empty."""
    for start in range(0, len(words), len(_EMPTY)):
        part = words[start : start + len(_EMPTY)]
        if part != _EMPTY:
            yield from (start + at for at, byte in enumerate(part) if byte)


def clients_of(found: Found) -> int:
    """The enum ping_client of abi.h: the clients that get an endpoint or a rejection."""
    rejects = bool(found.flags & abi.SERVICE_REJECT)
    clients = abi.PING_FROM_INSIDE if rejects or found.internal[1] else 0
    clients |= abi.PING_FROM_OUTSIDE if rejects or found.external[1] else 0
    is_cluster_ip = found.kind == abi.CONSTANTS["KIND_CLUSTER_IP"]
    return clients | abi.PING_TO_CLUSTER_IP if clients and is_cluster_ip else clients


def scopes_of(found: Found) -> list[tuple[int, tuple[int, int]]]:
    """The endpoint flag and the slot range for internal and external traffic."""
    bits = (
        abi.ENDPOINT_LOCAL if found.flags & abi.SERVICE_INTERNAL_LOCAL else abi.ENDPOINT_CLUSTER,
        abi.ENDPOINT_LOCAL if found.flags & abi.SERVICE_EXTERNAL_LOCAL else abi.ENDPOINT_CLUSTER,
    )
    return list(zip(bits, (found.internal, found.external), strict=True))


def _port(frontend: FrontendKey) -> tuple[bool, int, int]:
    """The entry in `View.ports`."""
    address, port, protocol = frontend
    return is_unspecified(address), protocol, port


def check_safe(maps: Maps, allowed: Mapping[FrontendKey, frozenset[frozenset[tuple[Address, int]]]]) -> None:
    """At any moment of a change, clients get a valid endpoint from a complete list.

    `allowed`: for each frontend, the possible sets of endpoints before and after the change.
    """
    view = View(maps)
    for frontend, found in view.services.items():
        assert found.id in view.names, f"{frontend}: the service has no name"
        if not is_unspecified(frontend[0]):
            unanswered = clients_of(found) & ~view.pings.get(frontend[0], 0)
            assert not unanswered, f"{frontend}: clients of the frontend get no answer to a ping"
        assert _port(frontend) in view.ports, f"{frontend}: missing in service_ports"
        for bit, range_ in scopes_of(found):
            ids = view.in_range(range_)
            is_plain = found.algorithm not in TABLES and not any(view.weight(id_) > 1 for id_ in ids)
            assert not is_plain or len(set(ids)) == len(ids), f"{frontend}: an endpoint twice in one list"
            for id_ in ids:
                assert 0 < id_ < len(view.endpoints), f"{frontend}: no such endpoint"
                endpoint = view.endpoints[id_]
                assert endpoint.service == found.id, f"{frontend}: another service's endpoint"
                assert endpoint.flags & abi.ENDPOINT_LISTED, f"{frontend}: an unlisted endpoint"
                assert endpoint.flags & bit, f"{frontend}: an endpoint of another scope"
            endpoints = frozenset((view.endpoints[i].address, view.endpoints[i].port) for i in ids)
            if frontend in allowed:
                assert endpoints in allowed[frontend], f"{frontend}: neither the old nor the new list"


def check_admitted(maps: Maps, allowed: Mapping[FrontendKey, list[frozenset[Network]]]) -> None:
    """At any moment of a change, a restricted frontend admits the old or the new ranges, and no others.

    `allowed`: by restricted frontend, its ranges before and after the change.
    """
    view = View(maps)
    for frontend, found in view.services.items():
        if found.flags & abi.SERVICE_RESTRICTED and frontend in allowed:
            held, states = view.sources[found.id], allowed[frontend]
            assert any(held >= state for state in states), f"{frontend}: rejects admitted clients"
            assert held <= frozenset().union(*states), f"{frontend}: admits clients outside its ranges"


def _entries_of(entry: ServicePortEntry, bit: int) -> Counter[tuple[Address, int]]:
    """How many entries each endpoint has in the list of this flag. In a table, equal endpoints may differ by
    one: then the counts are those without a remainder."""
    flags = entry.endpoints.flags()
    members = [(each, has >> 8 or 1) for each, has in zip(entry.endpoints, flags, strict=True) if has & bit]
    total = sum(weight for _, weight in members)
    if entry.algorithm in TABLES:
        size = next((s for s in (2039, 16381, 65521) if s >= 128 * len(members)), 65521)
        return Counter({(e.address, e.port): size * weight // total for e, weight in members})
    common = gcd(*(weight for _, weight in members))
    return Counter({(e.address, e.port): weight // common for e, weight in members})


def _room_of_lists(entry: ServicePortEntry) -> int:
    """The number of slots of both lists: each takes the next power of two."""
    bits = (abi.ENDPOINT_CLUSTER, abi.ENDPOINT_LOCAL)
    counts = [_entries_of(entry, bit).total() for bit in bits]
    return sum(_span(count, entry.algorithm) for count in counts if count)


def _span(count: int, algorithm: int) -> int:
    """The number of slots that a list occupies, including the turn of round robin."""
    return 1 << (count + (algorithm == abi.ALGORITHM_ROUND_ROBIN) - 1).bit_length()


def _with_flag(entry: ServicePortEntry, flag: int) -> list[tuple[Address, int]]:
    """Address and port of each endpoint with this flag."""
    endpoints = zip(entry.endpoints, entry.endpoints.flags(), strict=True)
    return [(each.address, each.port) for each, flags in endpoints if flags & flag]


def check_exact(
    maps: Maps, wanted: Mapping[ServicePortKey, ServicePortEntry], usage: Mapping[str, tuple[int, int]]
) -> None:
    """The maps contain exactly `wanted`, and `usage` is right."""
    check_safe(maps, {})
    view = View(maps)
    assert sorted(view.names.values()) == sorted(wanted), "names"
    ids = {key: id_ for id_, key in view.names.items()}
    assert 0 not in view.names
    frontends: dict[FrontendKey, tuple[ServicePortKey, int, int]] = {}
    for key, entry in wanted.items():
        for each in entry.frontends:
            frontends[each.address, each.port, each.protocol] = key, each.kind, each.flags
    assert view.services.keys() == frontends.keys(), "frontends"
    listed = view.listed()
    blocks: dict[tuple[int, int], tuple[int, int]] = {}
    for frontend, (key, kind, flags) in frontends.items():
        found, entry = view.services[frontend], wanted[key]
        assert (found.id, found.timeout) == (ids[key], entry.affinity_timeout)
        assert (found.kind, found.flags, found.algorithm) == (kind, flags, entry.algorithm)
        assert found.slow_start == entry.slow_start
        for bit, range_ in scopes_of(found):
            endpoints = [(p.address, p.port) for p in (view.endpoints[i] for i in view.in_range(range_))]
            expected_entries = _entries_of(entry, bit)
            if entry.algorithm in TABLES:
                surplus = Counter(endpoints) - expected_entries
                assert expected_entries <= Counter(endpoints), frontend
                assert surplus.total() < len(expected_entries), frontend
            elif max(expected_entries.values(), default=1) > 1:
                assert Counter(endpoints) == expected_entries, frontend
            else:
                assert endpoints == _with_flag(entry, bit), frontend
            if range_[1]:
                assert blocks.setdefault((found.id, bit), range_) == range_, "two lists of one scope"
    algorithms = {ids[key]: entry.algorithm for key, entry in wanted.items()}
    spans = sorted(
        (first, first + _span(count, algorithms[id_])) for (id_, _), (first, count) in blocks.items()
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "overlap"
    expected = {
        (ids[key], e.address, e.port, flags)
        for key, entry in wanted.items()
        for e, flags in zip(entry.endpoints, entry.endpoints.flags(), strict=True)
    }
    assert {(p.service, p.address, p.port, p.flags) for p in listed.values()} == expected, "endpoints"
    assert len(listed) == len(expected), "an endpoint twice"
    least = {ids[key] for key, each in wanted.items() if each.algorithm == abi.ALGORITHM_LEAST_CONNECTIONS}
    counted = {U32.unpack(key)[0] for key, _ in maps["connections"].items()}
    in_lists = {id_ for id_, each in listed.items() if each.service in least}
    assert counted == in_lists, "counted endpoints"
    ranges = {ids[key]: set(entry.source_ranges) for key, entry in wanted.items() if entry.source_ranges}
    assert view.sources == ranges, "source ranges"
    assert view.ports == {_port(frontend) for frontend in frontends}, "ports"
    pings: dict[Address, int] = defaultdict(int)
    for frontend, found in view.services.items():
        pings[frontend[0]] |= clients_of(found)
    assert view.pings == {a: clients for a, clients in pings.items() if clients and not is_unspecified(a)}
    assert usage["source_ranges"][0] == sum(map(len, ranges.values()))
    assert usage["services"][0] == len(frontends)
    assert usage["endpoints"][0] == len(expected)
    most = sum(_room_of_lists(entry) for entry in wanted.values())  # a list may have no frontend
    assert sum(end - start for start, end in spans) <= usage["slots"][0] <= most
