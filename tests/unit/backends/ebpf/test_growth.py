"""The sizes of the maps: how they follow the demand of a change."""

import dataclasses
import struct
from collections.abc import Iterator
from socket import htons
from typing import cast

import pytest

from ebpfproxy.backends.ebpf import abi, growth
from ebpfproxy.backends.ebpf.entries import FrontendEntry, ServicePortEntry
from ebpfproxy.backends.ebpf.growth import Demand, enlarged, first_sizes, with_room_for_flows
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import parse_address
from ebpfproxy.plan.planned_endpoints import ROW, PlannedEndpoints

LIMITS = MapSizes()
BOTH = abi.ENDPOINT_LISTED | abi.ENDPOINT_CLUSTER | abi.ENDPOINT_LOCAL
USAGE = {"services": (10, 64), "slots": (100, 256), "endpoints": (50, 128), "flows": (0, 1)}


def entry(frontends: int, endpoints: int, flags: int = BOTH) -> ServicePortEntry:
    return ServicePortEntry(
        tuple(FrontendEntry(parse_address("10.96.0.1"), port, 6, 1, 0) for port in range(1, frontends + 1)),
        PlannedEndpoints.packed(
            b"".join(
                ROW.pack(parse_address("10.1.0.1"), htons(port), flags | abi.ENDPOINT_LISTED)
                for port in range(1, endpoints + 1)
            )
        ),
        0,
    )


def demand(new: ServicePortEntry, previous: ServicePortEntry | None = None) -> dict[str, int]:
    """What is needed in addition to what is in use."""
    found = Demand(USAGE)
    found.add(new, previous)
    return {name: needed - USAGE[name][0] for name, needed in found.needed.items()}


def test_a_new_service_needs_a_power_of_two_of_slots_for_each_list() -> None:
    assert demand(entry(2, 5)) == {"services": 2, "endpoints": 5, "slots": 16}
    assert demand(entry(2, 5, abi.ENDPOINT_CLUSTER)) == {"services": 2, "endpoints": 5, "slots": 8}
    assert demand(entry(2, 5, 0)) == {"services": 2, "endpoints": 5, "slots": 0}


def test_a_changed_service_needs_its_additional_entries_and_new_lists() -> None:
    assert demand(entry(3, 5), entry(2, 4)) == {"services": 1, "endpoints": 1, "slots": 16}
    assert demand(entry(1, 1), entry(2, 4)) == {"services": 0, "endpoints": 0, "slots": 2}


def test_a_service_with_the_same_endpoints_needs_no_slots() -> None:
    assert demand(entry(3, 5), entry(2, 5)) == {"services": 1, "endpoints": 0, "slots": 0}


def test_a_full_map_doubles_although_entries_seem_free() -> None:
    """The free places of `slots` may be too short, and released ones rest."""
    sizes = dataclasses.replace(LIMITS, slots=256)
    found = Demand(USAGE)
    found.beyond(sizes, ["slots", "source_ranges"])
    assert enlarged(sizes, LIMITS, found.needed) == dataclasses.replace(sizes, slots=512)


def test_the_first_sizes_are_within_the_limits() -> None:
    sizes = first_sizes(dataclasses.replace(LIMITS, slots=100), growth.START, {})
    assert (sizes.services, sizes.slots) == (growth.START["services"], 100)
    assert sizes.half_open == LIMITS.half_open  # a flood has the same room at every size
    assert (
        dataclasses.replace(LIMITS, slots=100, **{n: s for n, s in growth.START.items() if n != "slots"})
        == sizes
    )


class Established:
    """The map `established_flows`."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        for kind, number in enumerate(self._numbers):
            yield struct.pack("=I", kind), struct.pack("=i", number)


@pytest.mark.parametrize(
    ("tcp", "others", "expected"), [(0, 0, 100), (30, 20, 100), (30, 21, 400), (-1, 0, 100), (0, -1, 100)]
)
def test_the_maps_of_flows_grow_beyond_half_of_their_size(tcp: int, others: int, expected: int) -> None:
    """Bug: a number that was -1 for a moment counted as 4,294,967,295."""
    established = cast(Map, Established(tcp, others))
    sizes, limits = MapSizes(flows=100), MapSizes(flows=1000)
    assert with_room_for_flows(sizes, limits, established).flows == expected
