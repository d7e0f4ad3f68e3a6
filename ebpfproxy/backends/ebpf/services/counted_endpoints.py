"""The keys of the map `connections`: the endpoints whose open connections are counted.

Only endpoints of Services with the algorithm least-connections have an entry. The programs and
flows/connections.py write the numbers.
"""

import contextlib
from collections.abc import Iterable

from ebpfproxy.backends.ebpf.services.record import U32
from ebpfproxy.errors import AlreadyExists, KernelError
from ebpfproxy.linux.bpf.bpf import Map

_NOEXIST = 1  # BPF_NOEXIST


class CountedEndpoints:
    """Adds and removes entries. An endpoint without room is not counted, and counts as unused."""

    def __init__(self, map_: Map) -> None:
        self._map = map_
        self._ids: set[int] = set()

    def read(self, wanted: Iterable[int]) -> None:
        """Make the map have exactly these ids. Numbers that exist stay."""
        wanted = set(wanted)
        self._ids = {U32.unpack(key)[0] for key, _ in self._map.items()}
        self.remove(self._ids - wanted)
        self.add(wanted)

    def add(self, ids: Iterable[int]) -> None:
        """Begin to count, at zero."""
        for id_ in set(ids) - self._ids:
            try:
                self._map.update(U32.pack(id_), U32.pack(0), _NOEXIST)
            except AlreadyExists:
                pass
            except KernelError:  # the map is full, or memory is missing
                return
            self._ids.add(id_)

    def remove(self, ids: Iterable[int]) -> None:
        """End counting."""
        for id_ in self._ids.intersection(ids):
            with contextlib.suppress(KernelError):
                self._map.delete(U32.pack(id_))
            self._ids.discard(id_)
