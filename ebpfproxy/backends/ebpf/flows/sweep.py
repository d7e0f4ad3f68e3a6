"""One walk over the flows that removes those that are over, in short steps.

The programs never remove an established TCP flow by age, and the maps `flows` and `replies` never evict. A
flow occupies its two entries and its port until this walk removes them. Each entry records when its own side
sent last. A flow is over once both of its entries are. An entry is over by itself if its counterpart is
missing or belongs to another flow. A UDP flow is also removed once its endpoint is no longer listed.

The programs ignore half-open flows that are over, and may evict them for a new flow. This walk removes them,
too. At its end, it sets the numbers of established flows, which the programs change. They may not include
flows that were established during the walk. The maps have room for them.

A batch lookup locks one bucket at a time with interrupts off. It passes empty buckets without yielding the
CPU: a sparse map was measured to hold a CPU for 36 ms (cilium #45564). BPF_MAP_GET_NEXT_KEY passes buckets in
the same way. One call for BATCH entries, in a map of 524 288 entries (Linux 6.18, 2 virtual CPUs), takes:
- 65 us if 300 000 entries are in use;
- 0.1 ms if 1000 are;
- 0.4 to 0.6 ms if so few are that it passes all buckets, which is the longest possible call.
"""

import dataclasses
import itertools
import mmap
import operator
import struct
import time
from collections.abc import Callable, Iterator
from socket import IPPROTO_TCP, IPPROTO_UDP
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.connections import Connections
from ebpfproxy.backends.ebpf.flows.state import (
    REPLY_GLANCE,
    FlowTimeouts,
    Oldest,
    columns,
    flow_key,
    protocols,
    reply_key,
)
from ebpfproxy.errors import AlreadyExists, KernelError
from ebpfproxy.linux.bpf.bpf import BUSY, Map, errno_of

BATCH = 128
"""Entries per call. The module's docstring has the duration."""

CROWDED_FIN = 5
"""Seconds without a packet after which a closed TCP flow is over while the room is scarce: time for several
retransmissions of its last segments. Connection tracking then removes closed connections at once
(gc_worker_can_early_drop() of nf_conntrack_core.c)."""

_NS = 1_000_000_000
_KEY = abi.FLOW_KEY.size
_VALUE = abi.FLOW.size
_HALF_OPEN_AT = abi.FLOW.offset("half_open")
_NOEXIST = 1  # BPF_NOEXIST
_GLANCE = columns(
    abi.FLOW,
    endpoint="16s",
    endpoint_port="H",
    service_id="I",
    endpoint_id="I",
    flags="H",
    half_open="B",
    last_seen="I",
)
_U32 = struct.Struct("=I")

assert abi.REPLY.size == _VALUE


class FlowMaps(NamedTuple):
    """The maps of flows. `endpoints` is the memory of the map `endpoints`."""

    flows: Map
    replies: Map
    established_flows: Map
    endpoints: mmap.mmap | bytes | bytearray


class Swept(NamedTuple):
    """Results of a walk.

    - `entries`, `half_open`: the numbers of established and half-open flows that stay.
    - `expired`, `retired`: the numbers of flows that were removed because they were over, or because their
      endpoint is no longer listed.
    - `replies`, `orphaned`: the number of entries of `replies` that stay, and of those without a flow that
      were removed.
    - `busy`: how often the kernel had a bucket locked.
    """

    entries: int = 0
    half_open: int = 0
    expired: int = 0
    retired: int = 0
    replies: int = 0
    orphaned: int = 0
    busy: int = 0


class FlowSweep:
    """Removes flows that are over. `clock` returns ns of CLOCK_MONOTONIC."""

    def __init__(
        self,
        maps: FlowMaps,
        timeouts: FlowTimeouts,
        clock: Callable[[], int] = time.monotonic_ns,
        connections: Connections | None = None,
    ) -> None:
        """`connections`: counts the flows of each walk."""
        self._connections = connections
        self._maps = maps
        self._timeouts = timeouts
        self._clock = clock
        self._start_over(crowded=False)

    def _start_over(self, crowded: bool) -> None:
        timeouts = self._timeouts
        if crowded:
            timeouts = dataclasses.replace(timeouts, tcp_fin=min(timeouts.tcp_fin, CROWDED_FIN))
        self._oldest = Oldest(timeouts, self._clock())
        self._half_open = self._of_tcp = self._expired = self._retired = self._orphaned = self._busy = 0

    def run(self, rest: Callable[[float], bool], *, crowded: bool = False) -> Swept:
        """Walk over all entries once.

        It calls `rest` between batches, with the seconds that the last batch took. The walk ends early if
        `rest` returns True. `crowded`: the room for established flows is scarce, so closed TCP flows are over
        after CROWDED_FIN. Raises KernelError if a map cannot be accessed.
        """
        self._start_over(crowded)
        if self._connections:
            self._connections.begin()
        stopped = False

        def pause(worked: float) -> bool:
            nonlocal stopped
            stopped = rest(worked)
            return stopped

        established = self._walk(self._maps.flows, self._sweep_flows, pause)
        if not stopped:
            for kind, number in (
                (abi.FLOWS_OF_TCP, self._of_tcp),
                (abi.FLOWS_OF_OTHERS, established - self._of_tcp),
            ):
                self._maps.established_flows.update(_U32.pack(kind), _U32.pack(number))
            if self._connections:
                self._connections.finish()
        replies = 0 if stopped else self._walk(self._maps.replies, self._sweep_replies, pause)
        removed = self._expired, self._retired
        return Swept(established, self._half_open, *removed, replies, self._orphaned, self._busy)

    def _walk(self, of: Map, handle: Callable[[bytes, bytes], int], rest: Callable[[float], bool]) -> int:
        """Call `handle` for each batch of keys and values; return the sum of its results."""
        found = 0
        began = self._clock()
        for keys, values in of.batches(BATCH):
            self._busy += not keys
            found += handle(keys, values)
            if rest((self._clock() - began) / _NS):
                break
            began = self._clock()
        return found

    # Flows

    def _sweep_flows(self, keys: bytes, values: bytes) -> int:
        """Remove the flows of a batch that are over; return the number of established ones that stay."""
        if self._connections:
            self._connections.add_flows(values)
        half_open, of = bytearray(values[_HALF_OPEN_AT::_VALUE]), bytearray(protocols(keys))
        for at in reversed(list(self._suspects(keys, values))):
            if self._remove_flow(keys[at * _KEY : (at + 1) * _KEY]):
                del half_open[at], of[at]
        self._half_open += sum(half_open)
        established = bytes(itertools.compress(of, map(operator.not_, half_open)))
        self._of_tcp += established.count(IPPROTO_TCP)
        return len(established)

    def _suspects(self, keys: bytes, values: bytes) -> Iterator[int]:
        """The positions of entries in a batch that may be over. It is a fast filter, since most are not."""
        oldest, is_listed = self._oldest, self._is_listed
        glances = zip(protocols(keys), _GLANCE.iter_unpack(values), strict=True)
        for at, (protocol, (address, port, service, id_, flags, half_open, seen)) in enumerate(glances):
            if seen < oldest[protocol, flags, half_open] or (
                protocol == IPPROTO_UDP and not is_listed(address, port, service, id_)
            ):
                yield at

    def _remove_flow(self, key: bytes) -> bool:
        """Remove a flow if it is over; return whether it is gone. Both entries are read again first.

        If its endpoint sends while the entry in `flows` is removed, that entry is inserted again.
        """
        value = self._maps.flows.lookup(key)
        if not value:
            return True
        in_replies = reply_key(key, value)
        (protocol,) = protocols(key)
        *endpoint, flags, half_open, seen = _GLANCE.unpack(value)
        retired = protocol == IPPROTO_UDP and not self._is_listed(*endpoint)

        def is_dead() -> bool:
            reply = self._reply_of(key, in_replies)
            return retired or self._is_silent((protocol, flags, half_open), seen, reply)

        if not is_dead() or not self._delete(self._maps.flows, key):
            return False
        if not is_dead():
            return not self._put_back(key, value)
        if self._reply_of(key, in_replies):
            self._delete(self._maps.replies, in_replies)
        self._retired += retired
        self._expired += not retired
        return True

    def _is_silent(self, kind: tuple[int, int, int], seen: int, reply: bytes | None) -> bool:
        """Whether both entries are over. The reply entry may be missing. `kind`: see `Oldest`."""
        if not reply:
            return seen < self._oldest[kind]
        protocol, flags, half_open = kind
        reply_flags, _, reply_seen = REPLY_GLANCE.unpack(reply)
        return bool(max(seen, reply_seen) < self._oldest[protocol, flags | reply_flags, half_open])

    def _reply_of(self, key: bytes, in_replies: bytes) -> bytes | None:
        """The entry of a flow in `replies`. None if it is missing, or belongs to another flow."""
        reply = self._maps.replies.lookup(in_replies)
        return reply if reply and flow_key(in_replies, reply) == key else None

    def _put_back(self, key: bytes, value: bytes) -> bool:
        """Insert a flow again, unless the programs have inserted it; return whether it has an entry now."""
        try:
            self._maps.flows.update(key, value, _NOEXIST)
        except AlreadyExists:
            pass
        except KernelError as failure:
            if errno_of(failure) not in BUSY:
                raise
            self._busy += 1
            return False
        return True

    # Replies

    def _sweep_replies(self, keys: bytes, values: bytes) -> int:
        """Remove the orphans of a batch that are over; return how many entries stay.

        The walk over `flows` handles entries with a flow.
        """
        staying = len(keys) // _KEY
        oldest = self._oldest
        glances = zip(protocols(keys), REPLY_GLANCE.iter_unpack(values), strict=True)
        for at, (protocol, (flags, half_open, seen)) in enumerate(glances):
            if seen < oldest[protocol, flags, half_open]:
                staying -= self._remove_orphan(keys[at * _KEY : (at + 1) * _KEY])
        return staying

    def _remove_orphan(self, in_replies: bytes) -> bool:
        """Remove a reply that is over and has no flow; return whether it is gone. It is read again first."""
        reply = self._maps.replies.lookup(in_replies)
        if not reply:
            return True
        (protocol,) = protocols(in_replies)
        flags, half_open, seen = REPLY_GLANCE.unpack(reply)
        if seen >= self._oldest[protocol, flags, half_open] or self._has_flow(in_replies, reply):
            return False
        if not self._delete(self._maps.replies, in_replies):
            return False
        self._orphaned += 1
        return True

    def _has_flow(self, in_replies: bytes, reply: bytes) -> bool:
        key = flow_key(in_replies, reply)
        value = self._maps.flows.lookup(key)
        return value is not None and reply_key(key, value) == in_replies

    def _delete(self, of: Map, key: bytes) -> bool:
        """Delete an entry; return whether it is gone. False if its bucket is locked."""
        try:
            of.delete(key)
        except KernelError as failure:
            if errno_of(failure) not in BUSY:
                raise
            self._busy += 1  # the next walk retries
            return False
        return True

    def _is_listed(self, address: bytes, port: int, service: int, id_: int) -> bool:
        """Whether the endpoint is in force and still the same, like endpoint_is_in_force() of bpf/flow.h.

        Ids are reused after a while. A direct flow belongs to no Service, so it has no endpoint to check.
        """
        if not service:
            return True
        at = id_ * abi.ENDPOINT.size
        if at + abi.ENDPOINT.size > len(self._maps.endpoints):
            return False
        *present, flags, owner = abi.ENDPOINT.unpack_from(self._maps.endpoints, at)
        return bool(flags & abi.ENDPOINT_LISTED) and (*present, owner) == (address, port, service)
