"""The maps `slots` and `endpoints`, mapped into memory, and the allocation of their entries."""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from socket import htons, ntohs

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import EndpointEntry
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.record import Range
from ebpfproxy.backends.ebpf.services.slot_ranges import Ids, Ranges

_FLAGS_AT = abi.ENDPOINT.offset("flags") // 2  # in units of 16 bits, as in `_halves`
_STRIDE = abi.ENDPOINT.size
_SLOT_STRIDE = 8  # an array's elements are 8-byte aligned
_SCAN = 4096


@lru_cache(maxsize=512)
def _slots_format(count: int) -> struct.Struct:
    return struct.Struct("=" + "I4x" * count)


class Arrays:
    """Both maps. Writes are visible to the programs at once. Close with `close`."""

    def __init__(self, maps: Maps) -> None:
        self._map(maps)
        self.endpoint_ids = Ids(maps["endpoints"].shape.max_entries)
        self.ranges = Ranges(maps["slots"].shape.max_entries)

    def move_to(self, maps: Maps) -> None:
        """Use larger maps with the same content."""
        self.close()
        self._map(maps)
        self.endpoint_ids.capacity = maps["endpoints"].shape.max_entries
        self.ranges.extend(maps["slots"].shape.max_entries)

    def _map(self, maps: Maps) -> None:
        self._slots = maps["slots"].mapped()
        self._endpoints = maps["endpoints"].mapped()
        self._halves = memoryview(self._endpoints).cast("H")

    def close(self) -> None:
        self._slots.close()
        self._halves.release()
        self._endpoints.close()

    def usage(self) -> dict[str, tuple[int, int]]:
        """The number of entries in use and the capacity, by map."""
        return {
            "slots": (self.ranges.used, self.ranges.capacity),
            "endpoints": (self.endpoint_ids.used, self.endpoint_ids.capacity - 1),
        }

    def read_slots(self, range_: Range) -> tuple[int, ...]:
        first, count = range_
        return _slots_format(count).unpack_from(self._slots, first * _SLOT_STRIDE) if count else ()

    def write_slots(self, first: int, ids: Sequence[int]) -> None:
        _slots_format(len(ids)).pack_into(self._slots, first * _SLOT_STRIDE, *ids)

    def listed(self) -> Iterator[tuple[int, EndpointEntry, int]]:
        """Id, entry and service id of each endpoint in force, by id."""
        empty = bytes(_SCAN * _STRIDE)
        for start in range(0, self.endpoint_ids.capacity, _SCAN):
            block = self._endpoints[start * _STRIDE : (start + _SCAN) * _STRIDE]
            if block == empty[: len(block)]:
                continue
            rows = abi.ENDPOINT.iter_unpack(block[: len(block) // _STRIDE * _STRIDE])
            for id_, (address, port, flags, service) in enumerate(rows, start):
                if flags & abi.ENDPOINT_LISTED and 0 < id_ < self.endpoint_ids.capacity:
                    yield id_, EndpointEntry(address, ntohs(port), flags), service

    def write_endpoint(self, id_: int, endpoint: EndpointEntry, service: int) -> None:
        address, port, flags = endpoint
        abi.ENDPOINT.pack_into(self._endpoints, id_ * _STRIDE, address, htons(port), flags, service)

    def flags(self, endpoint: int) -> int:
        return self._halves[endpoint * _STRIDE // 2 + _FLAGS_AT]

    def set_flags(self, endpoint: int, flags: int) -> None:
        """Write in one store. struct.pack_into() would write zeros first."""
        self._halves[endpoint * _STRIDE // 2 + _FLAGS_AT] = flags
