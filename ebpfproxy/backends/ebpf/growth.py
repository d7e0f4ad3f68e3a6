"""The sizes of the maps, which grow with their use (docs/decisions/0028).

A map never shrinks, and a restart keeps its size. The options --ebpf-NAME-max are the limits.
"""

import dataclasses
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.backends.ebpf.services import shares
from ebpfproxy.backends.ebpf.services.slot_lists import places_needed
from ebpfproxy.backends.ebpf.services.slot_ranges import Ranges
from ebpfproxy.errors import NotFound
from ebpfproxy.linux.bpf.bpf import Map

START = {"services": 16384, "slots": 262144, "endpoints": 131072, "flows": 32768}
"""The first sizes. 10,000 Services of 10 endpoints fit. Maps of other fields have their limit at once: they
take memory only for entries in use, or evict entries."""

_HEADROOM = 4 / 3
"""A map grows to the next power of two that leaves a quarter free, before a namespace alone has its share."""
_CROWDED = 0.5
"""`flows` grows when a larger part is in use, since it continues to fill until the programs are replaced."""
_FLOWS_FACTOR = 4
_S32 = struct.Struct("=i")


def first_sizes(limits: MapSizes, start: Mapping[str, int], in_force: Mapping[str, Path]) -> MapSizes:
    """The sizes at a start: `start`, or those of the maps in force if they are larger, within `limits`.

    `in_force`: the pins by map name, empty if there are none.
    """
    sizes = dict(start)
    for name, entries in _entries(in_force).items():
        if name in sizes:
            sizes[name] = max(sizes[name], entries)
    return dataclasses.replace(
        limits, **{name: min(size, getattr(limits, name)) for name, size in sizes.items()}
    )


def _entries(pins: Mapping[str, Path]) -> dict[str, int]:
    """The sizes of pinned maps, by field of MapSizes. A missing pin is left out."""
    found: dict[str, int] = {}
    for name in ("services", "slots", "endpoints", "flows", "half_open_flows"):
        try:
            opened = Map.pinned(pins[name])
        except (KeyError, NotFound):
            continue
        found[name] = opened.shape.max_entries
        opened.close()
    half_open = found.pop("half_open_flows", 0) * abi.CONSTANTS["HALF_OPEN_ROW"]
    if "flows" in found:
        found["flows"] = max(0, found["flows"] - half_open)
    return found


class Demand:
    """Adds up the entries that the maps of Services need during a change, when both the previous and the new
    lists of slots exist."""

    def __init__(self, usage: Mapping[str, tuple[int, int]]) -> None:
        """`usage`: entries in use and capacity, by field of MapSizes."""
        self.needed = {name: usage[name][0] for name in ("services", "slots", "endpoints")}

    def beyond(self, sizes: MapSizes, full: Iterable[str]) -> None:
        """Let the maps `full` need more than their size: their free entries could not be used."""
        for name in full:
            if name in self.needed:
                self.needed[name] = max(self.needed[name], getattr(sizes, name) + 1)

    def add(self, entry: ServicePortEntry, previous: ServicePortEntry | None) -> None:
        """Add a ServicePort. `previous`: what the maps contain of it."""
        frontends, endpoints = len(entry.frontends), len(entry.endpoints)
        if previous:
            frontends -= len(previous.frontends)
            endpoints -= len(previous.endpoints)
        self.needed["services"] += max(0, frontends)
        if previous and entry.endpoints == previous.endpoints and entry.algorithm == previous.algorithm:
            return
        self.needed["endpoints"] += max(0, endpoints)
        for flag in (abi.ENDPOINT_CLUSTER, abi.ENDPOINT_LOCAL):
            count = places_needed(entry, flag)
            self.needed["slots"] += 1 << Ranges.order_of(count) if count else 0


def enlarged(sizes: MapSizes, limits: MapSizes, needed: Mapping[str, int]) -> MapSizes:
    """The sizes with room for `needed` entries, by field of MapSizes, as far as `limits` permit.

    >>> small, limits = MapSizes(services=64), MapSizes(services=1000)
    >>> [enlarged(small, limits, {"services": n}).services for n in (51, 52, 100, 600, 5000)]
    [64, 128, 256, 1000, 1000]
    """
    larger = {}
    for name, entries in needed.items():
        present, limit = getattr(sizes, name), getattr(limits, name)
        if not shares.is_within(0, entries, present):
            larger[name] = max(present, min(limit, 1 << (int(entries * _HEADROOM) - 1).bit_length()))
    return dataclasses.replace(sizes, **larger)


def with_room_for_flows(sizes: MapSizes, limits: MapSizes, established: Map) -> MapSizes:
    """The sizes after the numbers of established flows were looked up. Raises KernelError.

    A number is negative for a moment if flows end that the last walk did not count.
    """
    flows = sum(_S32.unpack(number)[0] for _, number in established.items())
    if flows <= _CROWDED * sizes.flows:
        return sizes
    return dataclasses.replace(sizes, flows=max(sizes.flows, min(limits.flows, _FLOWS_FACTOR * sizes.flows)))


def differences(before: MapSizes, after: MapSizes) -> Iterable[tuple[str, int, int]]:
    """Name, previous and new size of each map that has grown."""
    for name in START:
        if getattr(before, name) != getattr(after, name):
            yield name, getattr(before, name), getattr(after, name)
