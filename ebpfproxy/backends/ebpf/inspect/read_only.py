"""Maps that are only read, for code that repairs what it reads: they record the repairs instead."""

import mmap

from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.arrays import Arrays
from ebpfproxy.linux.bpf.bpf import Map


class ReadOnlyMap(Map):
    """A map that no method changes."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd, name)
        self.repairs: dict[bytes, bytes | None] = {}
        """What a caller wanted to write, by key. None: it wanted to delete the key."""

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None:
        """Record a repair."""
        self.repairs[key] = value

    def update_all(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Record repairs."""
        self.repairs.update(entries)

    def delete(self, key: bytes) -> bool:
        """Record a repair."""
        self.repairs[key] = None
        return True

    def mapped(self) -> mmap.mmap:
        """Like `Map.mapped`. A write to the result raises TypeError."""
        return self.mapped_with(mmap.PROT_READ)


class ReadOnlyArrays(Arrays):
    """The arrays of Services, which no method changes."""

    def __init__(self, maps: Maps) -> None:
        super().__init__(maps, lambda: False)
        self.unknown: list[int] = []
        """The ids of endpoints in force that no record has: see `Reading`."""

    def set_flags(self, endpoint: int, flags: int) -> None:
        """Record an endpoint that should not be in force."""
        self.unknown.append(endpoint)
