"""The maps `slots` and `endpoints`, mapped into memory, and the allocation of their entries."""

import sys
from array import array
from collections.abc import Iterator, Sequence
from mmap import mmap

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps, slots_in
from ebpfproxy.backends.ebpf.services.record import U32, Range
from ebpfproxy.backends.ebpf.services.slot_ranges import EndGrace, Ids, Ranges
from ebpfproxy.plan.planned_endpoints import ROW

_FLAGS_AT = abi.ENDPOINT.offset("flags") // 2  # in units of 16 bits, as in `_halves`
_SERVICE_AT = abi.ENDPOINT.offset("service_id") // 4  # in units of 32 bits
_STRIDE = abi.ENDPOINT.size
_BLOCK = 4096  # endpoints
_COPIED = 1 << 20  # bytes in one block
_IS_LISTED = bytes(byte & abi.ENDPOINT_LISTED for byte in range(256))


def occupied(endpoints: mmap, capacity: int) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks of `endpoints` that are not empty, each with its first id. Most of the map is."""
    empty = bytes(_BLOCK * _STRIDE)
    for start in range(0, capacity, _BLOCK):
        block = endpoints[start * _STRIDE : min(start + _BLOCK, capacity) * _STRIDE]
        if block != empty[: len(block)]:
            yield start, block


class Arrays:
    """Both maps. Writes are visible to the programs at once. Close with `close`."""

    def __init__(self, maps: Maps, end_grace: EndGrace) -> None:
        self.end_grace = end_grace
        self._slots_memory = maps["slots"].mapped()
        self._slots = memoryview(self._slots_memory).cast("I")
        self._endpoints = maps["endpoints"].mapped()
        self._halves = memoryview(self._endpoints).cast("H")
        self.endpoint_ids = Ids(maps["endpoints"].shape.max_entries, end_grace)
        self.ranges = Ranges(slots_in(maps["slots"]), end_grace)
        # The digest of each list that is not one entry for each endpoint, by its first slot.
        self._expanded: dict[int, int] = {}

    def close(self) -> None:
        self._slots.release()
        self._slots_memory.close()
        self._halves.release()
        self._endpoints.close()

    def usage(self) -> dict[str, tuple[int, int]]:
        """The number of entries in use and the capacity, by map."""
        return {
            "slots": (self.ranges.used, self.ranges.capacity),
            "endpoints": (self.endpoint_ids.used, self.endpoint_ids.capacity - 1),
        }

    def read_slots(self, range_: Range) -> list[int]:
        first, count = range_
        return self._slots[first : first + count].tolist()

    def write_slots(self, first: int, ids: Sequence[int]) -> None:
        """Write slots that no program reads yet."""
        self._slots[first : first + len(ids)] = memoryview(array("I", ids))

    def replace_slots(self, first: int, ids: Sequence[int]) -> None:
        """Write slots that programs read meanwhile, each in one store."""
        for slot, id_ in enumerate(ids, first):
            self._slots[slot] = id_

    def expanded(self, first: int) -> int | None:
        """The digest of the list at this slot, see `slot_lists.digest`. None if it has one entry for each
        endpoint."""
        return self._expanded.get(first)

    def note_expanded(self, first: int, digest: int | None) -> None:
        """Remember the digest of a list, None to forget it."""
        if digest is not None:
            self._expanded[first] = digest
        elif self._expanded:
            self._expanded.pop(first, None)

    def forget_expanded(self) -> None:
        """Forget all digests."""
        self._expanded.clear()

    def listed(self) -> Iterator[tuple[int, bytes, int]]:
        """Id, row (`planned_endpoints`) and service id of each endpoint in force, by id."""
        for start, block in occupied(self._endpoints, self.endpoint_ids.capacity):
            flags = memoryview(block).cast("H")[_FLAGS_AT :: _STRIDE // 2].tolist()
            services = memoryview(block).cast("I")[_SERVICE_AT :: _STRIDE // 4].tolist()
            for number, (has, service) in enumerate(zip(flags, services, strict=True)):
                if has & abi.ENDPOINT_LISTED and start + number:  # id 0 is never used
                    at = number * _STRIDE
                    yield start + number, block[at : at + ROW.size], service

    def listed_counts(self) -> Iterator[int]:
        """The number of endpoints in force in each part of the map: their sum is that of `listed`."""
        at = abi.ENDPOINT.offset("flags") + (sys.byteorder == "big")
        for start, block in occupied(self._endpoints, self.endpoint_ids.capacity):
            first = 0 if start else _STRIDE
            yield block[first + at :: _STRIDE].translate(_IS_LISTED).count(1)

    def blocks(self) -> Iterator[bytes]:
        """The content of both maps, in blocks."""
        for memory in self._endpoints, self._slots_memory:
            for start in range(0, len(memory), _COPIED):
                yield memory[start : start + _COPIED]

    def endpoint(self, id_: int) -> bytes:
        """The packed entry of an endpoint."""
        return self._endpoints[id_ * _STRIDE : (id_ + 1) * _STRIDE]

    def write_endpoint(self, id_: int, row: bytes, service: int) -> None:
        self._endpoints[id_ * _STRIDE : (id_ + 1) * _STRIDE] = row + U32.pack(service)

    def flags(self, endpoint: int) -> int:
        return self._halves[endpoint * _STRIDE // 2 + _FLAGS_AT]

    def set_flags(self, endpoint: int, flags: int) -> None:
        """Write in one store. struct.pack_into() would write zeros first."""
        self._halves[endpoint * _STRIDE // 2 + _FLAGS_AT] = flags
