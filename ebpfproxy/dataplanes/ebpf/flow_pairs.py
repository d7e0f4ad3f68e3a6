"""All flows of the packet path, read from the maps with both entries of each.

Of 200 000 flows only the packed entries are held in memory.
"""

import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.flow_state import (
    REPLY_GLANCE,
    FlowTimeouts,
    Oldest,
    columns,
    flow_key,
    protocols,
    reply_key,
)
from ebpfproxy.dataplanes.ebpf.maps import Maps
from ebpfproxy.kernel.bpf import Map

_BATCH = 4096  # entries a call
_GLANCE = columns(abi.FLOW, flags="H", last_seen="I")


class Pair(NamedTuple):
    """The entries of a flow, packed. `flow` is None where only its reply is left, and the reverse."""

    key: bytes
    flow: bytes | None
    reply_key: bytes
    reply: bytes | None
    half_open: bool


def pairs(maps: Maps, timeouts: FlowTimeouts) -> list[Pair]:
    """By client and frontend. Half-open entries that are over are left out, as the programs ignore them;
    established ones are included until they are removed.
    """
    found = list(_joined(dict(_entries(maps["flows"])), dict(_entries(maps["replies"])), False))
    flows, replies = (
        dict(_half_open(maps[name], glance, timeouts))
        for name, glance in (("half_open_flows", _GLANCE), ("half_open_replies", REPLY_GLANCE))
    )
    found += _joined(flows, replies, True)
    found.sort(key=lambda pair: pair.key)
    return found


def count_half_open(maps: Maps, timeouts: FlowTimeouts) -> int:
    """How many half-open flows are not over."""
    return sum(1 for _ in _half_open(maps["half_open_flows"], _GLANCE, timeouts))


def _half_open(of: Map, glance: struct.Struct, timeouts: FlowTimeouts) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values that are not over. `glance`: of a value its flags, and when it was last seen."""
    oldest = Oldest(timeouts, time.monotonic_ns(), half_open=True)
    for key, value in _entries(of):
        flags, seen = glance.unpack(value)
        if seen >= oldest[protocols(key)[0], flags]:
            yield key, value


def _entries(of: Map) -> Iterator[tuple[bytes, bytes]]:
    """All keys and values."""
    key_size, size = of.shape.key_size, of.shape.value_size
    for keys, values in of.batches(_BATCH):
        for at in range(len(keys) // key_size):
            yield keys[at * key_size : (at + 1) * key_size], values[at * size : (at + 1) * size]


def _joined(flows: dict[bytes, bytes], replies: dict[bytes, bytes], half_open: bool) -> Iterator[Pair]:
    for key, flow in flows.items():
        place = reply_key(key, flow)
        reply = replies.get(place)
        if reply and flow_key(place, reply) == key:
            yield Pair(key, flow, place, replies.pop(place), half_open)
        else:
            yield Pair(key, flow, place, None, half_open)
    for place, reply in replies.items():
        yield Pair(flow_key(place, reply), None, place, reply, half_open)
