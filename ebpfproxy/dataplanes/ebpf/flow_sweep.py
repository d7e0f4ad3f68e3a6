"""One walk over the map `flows` that removes what is over, in pieces that hold up nobody.

It only frees memory: the programs themselves take an entry that is over for absent, and choose anew for a
UDP flow whose endpoint is retired.

A lookup of a batch locks one bucket at a time, interrupts off, and goes on over empty ones without giving
the CPU away, so that a sparse map was seen to hold one for 36 ms (cilium #45564). In a map of 524 288
entries (Linux 6.18, 2 virtual CPUs) a call for BATCH entries takes 65 us where 300 000 are in use, 0.1 ms
where 1000 are, and 0.4 to 0.6 ms where there are so few that it goes through all buckets: the longest call
that there is. BPF_MAP_GET_NEXT_KEY goes through them in the same way.
"""

import mmap
import time
from collections.abc import Callable, Iterator
from socket import IPPROTO_UDP
from typing import NamedTuple

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.flow_state import (
    Flow,
    FlowTimeouts,
    columns,
    keys,
    over_before,
    same_packed_flow,
)
from ebpfproxy.errors import KernelError
from ebpfproxy.kernel.bpf import BUSY, Map, errno_of

BATCH = 128
"""Entries a call: see above."""

_NS = 1_000_000_000
_KEY = abi.FLOW_KEY.size
_VALUE = abi.FLOW.size
_GLANCE = columns(
    endpoint="16s",
    endpoint_port="H",
    flags="H",
    service_id="I",
    endpoint_id="I",
    protocol="B",
    last_seen="Q",
)


class Swept(NamedTuple):
    """Entries: how many stay, were removed because they were over, or because their endpoint is retired;
    and how often the kernel had a bucket locked."""

    entries: int = 0
    expired: int = 0
    retired: int = 0
    busy: int = 0


class FlowSweep:
    """`endpoints` is the memory of the map of that name; `clock` tells ns of CLOCK_MONOTONIC."""

    def __init__(
        self,
        flows: Map,
        endpoints: mmap.mmap | bytes | bytearray,
        timeouts: FlowTimeouts,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._flows = flows
        self._endpoints = endpoints
        self._timeouts = timeouts
        self._clock = clock
        self._start_over()

    def _start_over(self) -> None:
        self._oldest = _Oldest(self._timeouts, self._clock())
        self._staying = self._expired = self._retired = self._busy = 0

    def run(self, rest: Callable[[float], bool]) -> Swept:
        """Walk over all entries once. `rest` is called between batches with the seconds that the last one
        took; where it returns True, the walk ends there.

        Raises KernelError where the map cannot be read.
        """
        self._start_over()
        began = self._clock()
        for packed_keys, values in self._flows.batches(BATCH):
            self._staying += len(packed_keys) // _KEY
            self._busy += not packed_keys
            for at in self._suspects(values):
                key = packed_keys[at * _KEY : (at + 1) * _KEY]
                self._staying -= self._remove(key, values[at * _VALUE : (at + 1) * _VALUE])
            if rest((self._clock() - began) / _NS):
                break
            began = self._clock()
        return Swept(self._staying, self._expired, self._retired, self._busy)

    def _suspects(self, values: bytes) -> Iterator[int]:
        """Which entries of a batch look dead: most of them never do."""
        oldest, is_listed = self._oldest, self._is_listed
        for at, (address, port, flags, service, id_, protocol, seen) in enumerate(
            _GLANCE.iter_unpack(values)
        ):
            if seen < oldest[protocol, flags] or (
                protocol == IPPROTO_UDP and not is_listed(address, port, flags, service, id_)
            ):
                yield at

    def _remove(self, key: bytes, value: bytes) -> bool:
        """Remove all entries of a flow, if all of them are dead; whether that at `key` is gone.

        Each is read again right before it is deleted: where a packet came meanwhile it stays, and the
        program restores from it those that are gone.
        """
        places = dict.fromkeys((key, *keys(Flow.unpack(value)).values()))
        entries = [self._entry(place, value) for place in places]
        if not all(self._is_dead(entry) for entry in entries if entry):
            return not entries[0]
        for place in (place for place, entry in zip(places, entries, strict=True) if entry):
            entry = self._entry(place, value)
            if entry and not (self._is_dead(entry) and self._delete(place, entry)):
                return place != key
        return True

    def _entry(self, key: bytes, flow: bytes) -> bytes | None:
        """The flow's entry there, as it is now; None where there is none, or another flow's."""
        value = self._flows.lookup(key)
        return value if value and same_packed_flow(value, flow) else None

    def _delete(self, key: bytes, value: bytes) -> bool:
        """Whether it is gone."""
        try:
            self._flows.delete(key)
        except KernelError as failure:
            if errno_of(failure) not in BUSY:
                raise
            self._busy += 1  # the next walk comes by again
            return False
        if self._is_over(value):
            self._expired += 1
        else:
            self._retired += 1
        return True

    def _is_dead(self, value: bytes) -> bool:
        address, port, flags, service, id_, protocol, _ = _GLANCE.unpack(value)
        if self._is_over(value):
            return True
        return protocol == IPPROTO_UDP and not self._is_listed(address, port, flags, service, id_)

    def _is_over(self, value: bytes) -> bool:
        _, _, flags, _, _, protocol, seen = _GLANCE.unpack(value)
        return bool(seen < self._oldest[protocol, flags])

    def _is_listed(self, address: bytes, port: int, of_flow: int, service: int, id_: int) -> bool:
        """Whether the endpoint is in force, and still the same: an id is given again after a while.

        As endpoint_is_in_force() of bpf/admit.h: a direct flow is no service's.
        """
        if of_flow & abi.FLOW_DIRECT:
            return True
        at = id_ * abi.ENDPOINT.size
        if at + abi.ENDPOINT.size > len(self._endpoints):
            return False
        place, number, flags, owner = abi.ENDPOINT.unpack_from(self._endpoints, at)
        return bool(flags & abi.ENDPOINT_LISTED) and (place, number, owner) == (address, port, service)


class _Oldest(dict[tuple[int, int], int]):
    """By protocol and flags: an entry last seen before this was over when the walk began."""

    def __init__(self, timeouts: FlowTimeouts, now: int) -> None:
        super().__init__()
        self._timeouts = timeouts
        self._now = now

    def __missing__(self, key: tuple[int, int]) -> int:
        self[key] = over_before(*key, self._timeouts, self._now)
        return self[key]
