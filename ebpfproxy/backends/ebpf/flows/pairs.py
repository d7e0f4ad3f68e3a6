"""Reads all flows of the packet path from the maps, with both entries of each.

Entries stay packed in memory, since there may be 200 000 flows.
"""

import struct
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.state import (
    REPLY_GLANCE,
    FlowTimeouts,
    Oldest,
    columns,
    flow_key,
    protocols,
    reply_key,
)
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.linux.bpf.bpf import Map

_BATCH = 4096  # entries a call
_GLANCE = columns(abi.FLOW, flags="H", half_open="B", last_seen="I")


class Pair(NamedTuple):
    """The entries of a flow, packed. `flow` is None if only the reply entry exists. `reply` is None if there
    is no reply entry."""

    key: bytes
    flow: bytes | None
    reply_key: bytes
    reply: bytes | None
    half_open: bool


def pairs(maps: Maps, timeouts: FlowTimeouts) -> list[Pair]:
    """All flows, sorted by client and frontend.

    Half-open entries that are over are skipped, since the programs ignore them. Established entries are
    included until they are removed.
    """
    oldest = Oldest(timeouts, time.monotonic_ns())
    flows, replies = (
        dict(_known(maps[name], glance, oldest))
        for name, glance in (("flows", _GLANCE), ("replies", REPLY_GLANCE))
    )
    return sorted(_joined(flows, replies), key=lambda pair: pair.key)


class FlowCount(NamedTuple):
    """Numbers of flows. `half_open` does not include flows that are over."""

    established: int
    half_open: int


def count(maps: Maps, timeouts: FlowTimeouts) -> FlowCount:
    """All flows, by their entries in `flows`."""
    oldest = Oldest(timeouts, time.monotonic_ns())
    counts = Counter(_is_half_open(_GLANCE, flow) for _, flow in _known(maps["flows"], _GLANCE, oldest))
    return FlowCount(counts[False], counts[True])


def _known(of: Map, glance: struct.Struct, oldest: Oldest) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values, without half-open ones that are over.

    `glance` unpacks from a value its flags, whether it is half-open, and when it was last seen.
    """
    for key, value in _entries(of):
        flags, half_open, seen = glance.unpack(value)
        if not half_open or seen >= oldest[protocols(key)[0], flags, half_open]:
            yield key, value


def _is_half_open(glance: struct.Struct, value: bytes) -> bool:
    _, half_open, _ = glance.unpack(value)
    return bool(half_open)


def _entries(of: Map) -> Iterator[tuple[bytes, bytes]]:
    """All keys and values."""
    key_size, size = of.shape.key_size, of.shape.value_size
    for keys, values in of.batches(_BATCH):
        for at in range(len(keys) // key_size):
            yield keys[at * key_size : (at + 1) * key_size], values[at * size : (at + 1) * size]


def _joined(flows: dict[bytes, bytes], replies: dict[bytes, bytes]) -> Iterator[Pair]:
    for key, flow in flows.items():
        in_replies = reply_key(key, flow)
        reply = replies.get(in_replies)
        half_open = _is_half_open(_GLANCE, flow)
        if reply and flow_key(in_replies, reply) == key:
            yield Pair(key, flow, in_replies, replies.pop(in_replies), half_open)
        else:
            yield Pair(key, flow, in_replies, None, half_open)
    for in_replies, reply in replies.items():
        half_open = _is_half_open(REPLY_GLANCE, reply)
        yield Pair(flow_key(in_replies, reply), None, in_replies, reply, half_open)
