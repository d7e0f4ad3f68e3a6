"""Another program that writes to the maps: single changes, or random content in all maps."""

import contextlib
import random
import struct
from collections.abc import Callable, Iterable
from typing import Any

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.errors import Rejected, TableFull
from ebpfproxy.model.address import Address, parse_address, parse_network
from tests.kernel.service_table.samples import (
    CLUSTER,
    LISTED,
    wipe,
)
from tests.support.service_maps import FrontendKey, View, write_slot


class ForeignWriter:
    """Writes content that ServiceTable never writes."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps
        self.view = View(maps)
        self.ids = {name.name: id_ for id_, name in self.view.names.items()}

    def service_key(self, dialled: FrontendKey) -> bytes:
        address, port, protocol = dialled
        return abi.SERVICE_KEY.pack(address, struct.unpack("=H", port.to_bytes(2, "big"))[0], protocol, 0)

    def service(self, ip: str, at: str | None = None, **changes: Any) -> None:
        """Change the value of the service at `ip`, or write it to `at` as well."""
        dialled = next(d for d in self.view.services if d[0] == parse_address(ip))
        found = self.view.services[dialled]._replace(**changes)
        packed = abi.SERVICE.pack(
            abi.SLOT_RANGE.pack(*found.internal), abi.SLOT_RANGE.pack(*found.external), *found[2:]
        )
        target = (parse_address(at), *dialled[1:]) if at else dialled
        self.maps["services"].update(self.service_key(target), packed)

    def first_slot(self, ip: str) -> int:
        return next(f.internal[0] for d, f in self.view.services.items() if d[0] == parse_address(ip))

    def slot(self, number: int, value: int) -> None:
        write_slot(self.maps["slots"], number, value)

    def all_slots(self, value: int) -> None:
        for number in range(len(self.view.slots)):
            self.slot(number, value)

    def swap_slots(self, ip: str) -> None:
        """Swap the first two slots of the list."""
        first = self.first_slot(ip)
        self.slot(first, self.view.slots[first + 1])
        self.slot(first + 1, self.view.slots[first])

    def lengthen(self, *ips: str) -> None:
        """Make all lists of these frontends one slot longer."""
        for ip in ips:
            first, count = next(
                f.internal for d, f in self.view.services.items() if d[0] == parse_address(ip)
            )
            self.service(ip, internal=(first, count + 1), external=(first, count + 1))

    def endpoint(self, ip: str, of: str, **changes: Any) -> None:
        id_, place = next(
            (i, p)
            for i, p in self.view.listed().items()
            if p.address == parse_address(ip) and p.service == self.ids[f"default/{of}"]
        )
        self.endpoint_at(id_, **{**place._asdict(), **changes})

    def endpoint_at(self, id_: int, address: Address, port: int, flags: int, service: int) -> None:
        value = abi.ENDPOINT.pack(address, struct.unpack("=H", port.to_bytes(2, "big"))[0], flags, service)
        self.maps["endpoints"].update(struct.pack("=I", id_), value)

    def name(self, id_: int, text: bytes, protocol: int = 6, version: int = 4) -> None:
        self.maps["service_names"].update(
            struct.pack("=I", id_), abi.SERVICE_NAME.pack(text, protocol, version)
        )

    def source(self, of: int | str, range_: str, value: int = 1) -> None:
        """Add a source range. `of`: the service's name or id."""
        id_ = self.ids[f"default/{of}"] if isinstance(of, str) else of
        net = parse_network(range_)
        packed = abi.SOURCE_RANGE_KEY.pack(32 + net.length, id_, net.address)
        self.maps["source_ranges"].update(packed, struct.pack("=I", value))

    def sources_of_all(self, length: int) -> None:
        """Add a source range that covers the ids of many services."""
        packed = abi.SOURCE_RANGE_KEY.pack(length, self.ids["default/guarded"], bytes(16))
        self.maps["source_ranges"].update(packed, struct.pack("=I", 1))

    def delete_some(self, name: str, count: int) -> None:
        for packed, _ in list(self.maps[name].items())[:count]:
            self.maps[name].delete(packed)

    def frontend_address(self, ip: str, value: int = 1) -> None:
        self.maps["frontend_addresses"].update(parse_address(ip), abi.FRONTEND_ADDRESS.pack(value))

    def port_bits(self, words: Iterable[int], bits: int) -> None:
        for word in words:
            self.maps["service_ports"].update(struct.pack("=I", word), struct.pack("=Q", bits))

    def unname(self, of: str) -> None:
        self.maps["service_names"].delete(struct.pack("=I", self.ids[f"default/{of}"]))


SOME = parse_address("198.51.100.1")

DAMAGES: dict[str, Callable[[ForeignWriter], object]] = {
    "the id of another service": lambda v: v.service("10.96.0.1", id=v.ids["default/api"]),
    "all of another service": lambda v: v.service("10.96.0.2", at="10.96.0.1"),
    "an id of no service": lambda v: v.service("10.96.0.1", id=77),
    "a huge id": lambda v: v.service("10.96.0.1", id=0xFFFFFFFF),
    "id 0": lambda v: v.service("10.96.0.1", id=0),
    "a range beyond the map": lambda v: v.service("10.96.0.1", internal=(0xFFFFFFF0, 100)),
    "a range that is too long": lambda v: v.service("10.96.0.1", internal=(v.first_slot("10.96.0.1"), 3)),
    "all ranges too long": lambda v: v.lengthen("10.96.0.1", "203.0.113.1"),
    "the only range too long": lambda v: v.lengthen("fd00::53"),
    "a range that is too short": lambda v: v.service("10.96.0.1", internal=(v.first_slot("10.96.0.1"), 1)),
    "a list where there should be none": lambda v: v.service(
        "10.96.0.4", internal=(200, 4), external=(200, 4)
    ),
    "no list where there should be one": lambda v: v.service("10.96.0.1", internal=(0, 0), external=(0, 0)),
    "another's list": lambda v: v.service(
        "10.96.0.1", internal=(v.first_slot("10.96.0.2"), 2), external=(v.first_slot("10.96.0.2"), 2)
    ),
    "another timeout at one frontend": lambda v: v.service("10.96.0.2", timeout=7),
    "another timeout at the other": lambda v: v.service("10.96.0.9", timeout=7),
    "other flags": lambda v: v.service("10.96.0.1", flags=255),
    "unknown flags": lambda v: v.service("10.96.0.1", flags=1 << 15),
    "an unknown kind": lambda v: v.service("10.96.0.1", kind=99),
    "another algorithm": lambda v: v.service("10.96.0.1", algorithm=abi.ALGORITHM_ROUND_ROBIN),
    "another algorithm at a frontend of round robin": lambda v: v.service(
        "10.96.0.6", algorithm=abi.ALGORITHM_RANDOM
    ),
    "a table that is none": lambda v: v.service("10.96.0.1", algorithm=abi.ALGORITHM_MAGLEV),
    "an unknown algorithm": lambda v: v.service("10.96.0.1", algorithm=200),
    "another slow start": lambda v: v.service("10.96.0.1", slow_start=9),
    "another weight": lambda v: v.endpoint("10.1.0.2", "web", flags=CLUSTER | 3 << 8),
    "no weight": lambda v: v.endpoint("10.1.0.2", "weighted", flags=CLUSTER),
    "an entry of a weighted list": lambda v: v.slot(
        v.first_slot("10.96.0.7"), v.view.slots[v.first_slot("10.96.0.7") + 1]
    ),
    "a frontend too many": lambda v: v.service("10.96.0.1", at="198.51.100.1"),
    "a frontend too many, with a range of its own": lambda v: v.service(
        "10.96.0.1", at="198.51.100.1", internal=(200, 2), external=(200, 2)
    ),
    "a frontend too many, with an empty range": lambda v: v.service(
        "10.96.0.1", at="198.51.100.1", internal=(0, 0), external=(0, 0)
    ),
    "a frontend of a service that has none": lambda v: v.service(
        "10.96.0.1", at="198.51.100.1", id=v.ids["default/unexposed"]
    ),
    "a frontend of no service": lambda v: v.service("10.96.0.1", at="198.51.100.1", id=99),
    "a key with padding": lambda v: v.maps["services"].update(
        abi.SERVICE_KEY.pack(SOME, 80, 6, 1), bytes(abi.SERVICE.size)
    ),
    "a key of another protocol": lambda v: v.maps["services"].update(
        abi.SERVICE_KEY.pack(SOME, 80, 200, 0), bytes(abi.SERVICE.size)
    ),
    "a frontend deleted": lambda v: v.maps["services"].delete(
        next(k for k, _ in v.maps["services"].items() if k[:16] == parse_address("10.96.0.1"))
    ),
    "slots zeroed": lambda v: v.all_slots(0),
    "one slot zeroed": lambda v: v.slot(v.first_slot("10.96.0.1"), 0),
    "a slot of another service": lambda v: v.slot(
        v.first_slot("10.96.0.1"), v.view.slots[v.first_slot("10.96.0.2")]
    ),
    "a slot twice": lambda v: v.slot(v.first_slot("10.96.0.1"), v.view.slots[v.first_slot("10.96.0.1") + 1]),
    "slots in another order": lambda v: v.swap_slots("10.96.0.1"),
    "slots beyond the endpoints": lambda v: v.all_slots(0xFFFFFFFF),
    "flags cleared": lambda v: v.endpoint("10.1.0.2", "web", flags=0),
    "no scope": lambda v: v.endpoint("10.1.0.2", "web", flags=LISTED),
    "another scope": lambda v: v.endpoint("10.1.0.2", "web", flags=LISTED | abi.ENDPOINT_LOCAL),
    "unknown endpoint flags": lambda v: v.endpoint("10.1.0.2", "web", flags=CLUSTER | 1 << 15),
    "another address": lambda v: v.endpoint("10.1.0.2", "web", address=SOME),
    "the address of the other endpoint": lambda v: v.endpoint(
        "10.1.0.2", "web", address=parse_address("10.1.0.1")
    ),
    "another port": lambda v: v.endpoint("10.1.0.2", "web", port=9999),
    "another owner": lambda v: v.endpoint("10.1.0.2", "web", service=v.ids["default/api"]),
    "an owner of no service": lambda v: v.endpoint("10.1.0.2", "web", service=98),
    "an endpoint too many": lambda v: v.endpoint_at(100, SOME, 80, CLUSTER, v.ids["default/web"]),
    "an endpoint listed but unused": lambda v: v.endpoint_at(100, SOME, 80, LISTED, v.ids["default/web"]),
    "an endpoint of no service": lambda v: v.endpoint_at(100, SOME, 80, CLUSTER, 98),
    "endpoint 0": lambda v: v.endpoint_at(0, SOME, 80, CLUSTER, v.ids["default/web"]),
    "the same place again": lambda v: v.endpoint_at(
        100, parse_address("10.1.0.2"), 8080, CLUSTER, v.ids["default/web"]
    ),
    "the same place before": lambda v: v.endpoint_at(
        0, parse_address("10.1.0.2"), 8080, CLUSTER, v.ids["default/web"]
    ),
    "a name deleted": lambda v: v.unname("web"),
    "the name of one without frontends deleted": lambda v: v.unname("unexposed"),
    "another name": lambda v: v.name(v.ids["default/web"], b"default/other"),
    "the name of another": lambda v: v.name(v.ids["default/web"], b"default/api"),
    "no text": lambda v: v.name(v.ids["default/web"], b"\xff\xfe"),
    "a name of an unknown protocol": lambda v: v.name(v.ids["default/web"], b"default/web", protocol=200),
    "a name of an unknown family": lambda v: v.name(v.ids["default/web"], b"default/web", version=5),
    "a name too many": lambda v: v.name(66, b"default/another"),
    "a name too many, of an unknown protocol": lambda v: v.name(66, b"default/another", protocol=200),
    "a name that another has": lambda v: v.name(66, b"default/web"),
    "a name of id 0": lambda v: v.name(0, b"default/zero"),
    "a name of id 0 that another has": lambda v: v.name(0, b"default/web"),
    "a name of a huge id": lambda v: v.name(0xFFFFFFFF, b"default/huge"),
    "a source range too many": lambda v: v.source("guarded", "203.0.113.0/25"),
    "a source range where there should be none": lambda v: v.source("web", "203.0.113.0/25"),
    "a source range with another value": lambda v: v.source("guarded", "192.0.2.7/32", value=0),
    "a source range of no service": lambda v: v.source(99, "0.0.0.0/0"),
    "a source range of id 0": lambda v: v.source(0, "0.0.0.0/0"),
    "a source range of every service": lambda v: v.sources_of_all(0),
    "a source range of many services": lambda v: v.sources_of_all(31),
    "a source range of any family": lambda v: v.sources_of_all(32),
    "a source range gone": lambda v: v.delete_some("source_ranges", 1),
    "source ranges gone": lambda v: v.delete_some("source_ranges", 99),
    "an address too many": lambda v: v.frontend_address("198.51.100.1"),
    "the address of NodePorts": lambda v: v.frontend_address("0.0.0.0"),
    "an address with another value": lambda v: v.frontend_address("10.96.0.1", value=0),
    "an address gone": lambda v: v.delete_some("frontend_addresses", 1),
    "addresses gone": lambda v: v.delete_some("frontend_addresses", 99),
    "bits of ports gone": lambda v: v.port_bits(range(abi.CONSTANTS["SERVICE_PORT_WORDS"]), 0),
    "a bit of a port that no service has": lambda v: v.port_bits([2047], 1 << 63),
    "everything gone": lambda v: wipe(v.maps),
    "names gone": lambda v: [
        v.maps["service_names"].delete(k) for k, _ in list(v.maps["service_names"].items())
    ],
    "services gone": lambda v: [v.maps["services"].delete(k) for k, _ in list(v.maps["services"].items())],
}

HARMLESS = {
    "slots in another order",  # a slot of a list is selected at random
    "an endpoint of no service",  # no list refers to it; it is deleted by the next change
    "endpoint 0",
    "the same place again",
    "the same place before",
    "a source range with another value",  # repaired by the next read, as all that follow
    "a source range of no service",
    "a source range of id 0",
    "a source range of every service",
    "a source range of many services",
    "an address too many",
    "the address of NodePorts",
    "an address with another value",
    "an address gone",
    "addresses gone",
    "bits of ports gone",
    "a bit of a port that no service has",
}


def spoil(maps: Maps, chance: random.Random) -> None:
    for name in ("services", "service_names"):
        shape = maps[name].shape
        keys = [k for k, _ in maps[name].items()]
        for _ in range(chance.choice((0, 1, 5, shape.max_entries))):
            with contextlib.suppress(TableFull):
                packed = chance.choice(keys) if chance.random() < 0.3 else chance.randbytes(shape.key_size)
                value = chance.randbytes(shape.value_size)
                if name == "services" and chance.random() < 0.5:  # an id that is in use
                    value = value[:16] + struct.pack("=I", chance.randrange(8)) + value[20:]
                maps[name].update(packed, value)
    for _ in range(chance.choice((0, 1, 5, maps["source_ranges"].shape.max_entries))):
        with contextlib.suppress(TableFull, Rejected):  # ENOSPC: a map of this type is full
            id_ = chance.choice((chance.randrange(8), chance.randrange(1 << 32)))
            packed = abi.SOURCE_RANGE_KEY.pack(chance.randrange(161), id_, chance.randbytes(16))
            maps["source_ranges"].update(packed, chance.randbytes(4))
    for _ in range(chance.choice((0, 1, 5, maps["frontend_addresses"].shape.max_entries))):
        with contextlib.suppress(TableFull):
            maps["frontend_addresses"].update(chance.randbytes(16), chance.randbytes(4))
    for name in ("slots", "endpoints"):
        shape = maps[name].shape
        for _ in range(chance.choice((0, 1, 10, shape.max_entries))):
            last = struct.pack("=I", chance.choice((chance.randrange(8), chance.randrange(1 << 32))))
            junk = chance.randbytes(shape.value_size - 4) + last
            maps[name].update(struct.pack("=I", chance.randrange(shape.max_entries)), junk)
