"""The maps of services, their endpoints and what else they lead to, as the programs see them.

Read with lookups of our own, on purpose without ServiceTable, which is judged by what is found here.
"""

import itertools
import struct
from collections import defaultdict
from collections.abc import Mapping
from socket import ntohs
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.model.address import Address, Family, Network, is_unspecified, network

U32 = struct.Struct("=I")
PORT_LINES = (6, 17, 132)  # TCP, UDP, SCTP


class Found(NamedTuple):
    """A value of `services`, unpacked."""

    internal: tuple[int, int]
    external: tuple[int, int]
    id: int
    timeout: int
    flags: int
    kind: int


class EndpointValue(NamedTuple):
    """A value of `endpoints`, unpacked."""

    address: Address
    port: int
    flags: int
    service: int


Dialled = tuple[Address, int, int]


class View:
    """What all these maps hold at one moment."""

    def __init__(self, maps: Maps) -> None:
        self.services: dict[Dialled, Found] = {}
        for key, value in maps["services"].items():
            address, port, protocol, pad = abi.SERVICE_KEY.unpack(key)
            assert pad == 0
            internal, external, *rest, pad = abi.SERVICE.unpack(value)
            assert pad == 0
            found = Found(struct.unpack("=II", internal), struct.unpack("=II", external), *rest)
            self.services[address, ntohs(port), protocol] = found
        self.names: dict[int, ServicePortKey] = {}
        for key, value in maps["service_names"].items():
            text, protocol, version = abi.SERVICE_NAME.unpack(value)
            of = {4: Family.IPV4, 6: Family.IPV6}[version]
            self.names[U32.unpack(key)[0]] = ServicePortKey(text.rstrip(b"\0").decode(), protocol, of)
        self.slots = [U32.unpack(value)[0] for _, value in sorted(_numbered(maps, "slots"))]
        self.endpoints = []
        for _, value in sorted(_numbered(maps, "endpoints")):
            address, port, flags, service = abi.ENDPOINT.unpack(value)
            self.endpoints.append(EndpointValue(address, ntohs(port), flags, service))
        self.sources: dict[int, set[Network]] = defaultdict(set)
        for key, value in maps["source_ranges"].items():
            length, service, source = abi.SOURCE_RANGE_KEY.unpack(key)
            assert U32.unpack(value) == (1,)
            self.sources[service].add(network(source, length - 32))  # bits beyond it are kept, and unused
        self.pings: dict[Address, int] = {}
        for key, value in maps["frontend_addresses"].items():
            (self.pings[Address(key)],) = U32.unpack(value)
        self.ports: set[tuple[bool, int, int]] = set()  # whether a NodePort's, the protocol, the port
        with maps["service_ports"].mapped() as memory:
            words = memory[: 8 * abi.CONSTANTS["SERVICE_PORT_WORDS"]]
        for at in (at for at, byte in enumerate(words) if byte):  # the lowest bits of a word come first
            (of_node_ports, line), first = divmod(at // 8192, len(PORT_LINES)), at % 8192 * 8
            bits = (bit for bit in range(8) if words[at] >> bit & 1)
            self.ports |= {(bool(of_node_ports), PORT_LINES[line], first + bit) for bit in bits}

    def listed(self) -> dict[int, EndpointValue]:
        return {id_: place for id_, place in enumerate(self.endpoints) if place.flags & abi.ENDPOINT_LISTED}

    def in_range(self, range_: tuple[int, int]) -> list[int]:
        """The endpoint ids that a program finds there."""
        first, count = range_
        assert first + count <= len(self.slots), "beyond the map"
        return self.slots[first : first + count]


def _numbered(maps: Maps, name: str) -> list[tuple[int, bytes]]:
    return [(U32.unpack(key)[0], value) for key, value in maps[name].items()]


def clients_of(found: Found) -> int:
    """Abi.h's enum ping_client: who gets an endpoint or a rejection."""
    rejects = bool(found.flags & abi.SERVICE_REJECT)
    inside = abi.PING_FROM_INSIDE if rejects or found.internal[1] else 0
    return inside | (abi.PING_FROM_OUTSIDE if rejects or found.external[1] else 0)


def scopes_of(found: Found) -> list[tuple[int, tuple[int, int]]]:
    """The endpoint flag and the range, for internal and external."""
    bits = (
        abi.ENDPOINT_LOCAL if found.flags & abi.SERVICE_INTERNAL_LOCAL else abi.ENDPOINT_CLUSTER,
        abi.ENDPOINT_LOCAL if found.flags & abi.SERVICE_EXTERNAL_LOCAL else abi.ENDPOINT_CLUSTER,
    )
    return list(zip(bits, (found.internal, found.external), strict=True))


def _port(dialled: Dialled) -> tuple[bool, int, int]:
    """As in `View.ports`."""
    address, port, protocol = dialled
    return is_unspecified(address), protocol, port


def check_safe(maps: Maps, allowed: Mapping[Dialled, frozenset[frozenset[tuple[Address, int]]]]) -> None:
    """Whatever is under way: a client gets an endpoint in force, out of a list that is whole.

    `allowed`: for each frontend, the sets of places that it may lead to, before or after the change.
    """
    view = View(maps)
    for dialled, found in view.services.items():
        assert found.id in view.names, f"{dialled}: the service has no name"
        if not is_unspecified(dialled[0]):
            unanswered = clients_of(found) & ~view.pings.get(dialled[0], 0)
            assert not unanswered, f"{dialled}: clients that it serves get no answer to a ping"
        assert _port(dialled) in view.ports, f"{dialled}: no program looks it up"
        for bit, range_ in scopes_of(found):
            ids = view.in_range(range_)
            assert len(set(ids)) == len(ids), f"{dialled}: an endpoint twice in one list"
            for id_ in ids:
                assert 0 < id_ < len(view.endpoints), f"{dialled}: no such endpoint"
                place = view.endpoints[id_]
                assert place.service == found.id, f"{dialled}: another service's endpoint"
                assert place.flags & abi.ENDPOINT_LISTED, f"{dialled}: an endpoint that is drained"
                assert place.flags & bit, f"{dialled}: an endpoint of another scope"
            places = frozenset((view.endpoints[i].address, view.endpoints[i].port) for i in ids)
            if dialled in allowed:
                assert places in allowed[dialled], f"{dialled}: neither the old nor the new list"


def check_admitted(maps: Maps, allowed: Mapping[Dialled, list[frozenset[Network]]]) -> None:
    """Whatever is under way: a restricted frontend admits whom its old or its new ranges do, and nobody else.

    `allowed`: by restricted frontend, its ranges before and after the change.
    """
    view = View(maps)
    for dialled, found in view.services.items():
        if found.flags & abi.SERVICE_RESTRICTED and dialled in allowed:
            held, states = view.sources[found.id], allowed[dialled]
            assert any(held >= state for state in states), f"{dialled}: rejects whom it should admit"
            assert held <= frozenset().union(*states), f"{dialled}: admits whom it should reject"


def _room_of_lists(entry: ServicePortEntry) -> int:
    """How many slots both lists take: each the next power of two."""
    bits = (abi.ENDPOINT_CLUSTER, abi.ENDPOINT_LOCAL)
    counts = (sum(bool(each.flags & bit) for each in entry.endpoints) for bit in bits)
    return sum(1 << (count - 1).bit_length() for count in counts if count)


def check_exact(
    maps: Maps, wanted: Mapping[ServicePortKey, ServicePortEntry], usage: Mapping[str, tuple[int, int]]
) -> None:
    """The maps hold `wanted` and nothing else, and `usage` counts it rightly."""
    check_safe(maps, {})
    view = View(maps)
    assert sorted(view.names.values()) == sorted(wanted), "names"
    ids = {key: id_ for id_, key in view.names.items()}
    assert 0 not in view.names
    frontends: dict[Dialled, tuple[ServicePortKey, int, int]] = {}
    for key, entry in wanted.items():
        for each in entry.frontends:
            frontends[each.address, each.port, each.protocol] = key, each.kind, each.flags
    assert view.services.keys() == frontends.keys(), "frontends"
    listed = view.listed()
    blocks: dict[tuple[int, int], tuple[int, int]] = {}
    for dialled, (key, kind, flags) in frontends.items():
        found, entry = view.services[dialled], wanted[key]
        assert (found.id, found.timeout) == (ids[key], entry.affinity_timeout)
        assert (found.kind, found.flags) == (kind, flags)
        for bit, range_ in scopes_of(found):
            places = [(p.address, p.port) for p in (view.endpoints[i] for i in view.in_range(range_))]
            assert places == [(e.address, e.port) for e in entry.endpoints if e.flags & bit], dialled
            if range_[1]:
                assert blocks.setdefault((found.id, bit), range_) == range_, "two lists of one scope"
    spans = sorted((first, first + (1 << (count - 1).bit_length())) for first, count in blocks.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "overlap"
    expected = {
        (ids[key], e.address, e.port, e.flags) for key, entry in wanted.items() for e in entry.endpoints
    }
    assert {(p.service, p.address, p.port, p.flags) for p in listed.values()} == expected, "endpoints"
    assert len(listed) == len(expected), "an endpoint twice"
    ranges = {ids[key]: set(entry.source_ranges) for key, entry in wanted.items() if entry.source_ranges}
    assert view.sources == ranges, "source ranges"
    assert view.ports == {_port(dialled) for dialled in frontends}, "ports"
    pings: dict[Address, int] = defaultdict(int)
    for dialled, found in view.services.items():
        pings[dialled[0]] |= clients_of(found)
    assert view.pings == {a: clients for a, clients in pings.items() if clients and not is_unspecified(a)}
    assert usage["source_ranges"][0] == sum(map(len, ranges.values()))
    assert usage["services"][0] == len(frontends)
    assert usage["endpoints"][0] == len(expected)
    most = sum(_room_of_lists(entry) for entry in wanted.values())  # a list may have no frontend
    assert sum(end - start for start, end in spans) <= usage["slots"][0] <= most
