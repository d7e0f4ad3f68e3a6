"""The map `source_ranges`: by service id, the networks whose clients a restricted frontend admits.

The kernel finds the longest match. Any match admits the client, so ranges may overlap.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.services.check import Written
from ebpfproxy.backends.ebpf.services.record import U32
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, Network, network

SERVICE_ID_BITS = 32
"""The bits of the service id, which precede the network in a key and in its length."""
_ADMITTED = U32.pack(1)
_WALKED = 256  # entries in one step


class SourceRanges:
    """The entries of the map. The caller adds new ranges before they are used, and removes old ones
    afterwards."""

    def __init__(self, map_: Map) -> None:
        self._map = map_
        self.used = 0
        self._version = 0  # another number after each change
        self.capacity = map_.shape.max_entries

    def read(self, known: Set[int]) -> dict[int, list[Network]]:
        """The networks by service id, sorted. Entries of a service that is not `known`, or of several, are
        deleted.

        Wrong values are corrected. They have no effect, since the programs only check whether an entry
        exists.
        """
        found: dict[int, set[Network]] = defaultdict(set)
        for key, value in list(self._map.items()):
            length, service, address = abi.SOURCE_RANGE_KEY.unpack(key)
            if length < SERVICE_ID_BITS or service not in known:
                self._map.delete(key)
                continue
            found[service].add(network(Address(address), length - SERVICE_ID_BITS))
            if value != _ADMITTED:
                self._map.update(key, _ADMITTED)
        self.used = sum(map(len, found.values()))
        return {service: sorted(networks) for service, networks in found.items()}

    def check(self, written: Written) -> Iterator[bool]:
        """Yield after each step whether the map has exactly the source ranges of the records.

        An LPM trie cannot be asked for one key, so the map is walked. If a range changes meanwhile, the rest
        is left to the next check.
        """
        version, found = self._version, 0
        services = {record.id: record for record in written.records.values() if record.entry.source_ranges}
        yield True
        for keys, values in self._map.batches(_WALKED):
            if self._version != version:
                return
            size, right = self._map.shape.key_size, values == _ADMITTED * (len(values) // len(_ADMITTED))
            for at in range(0, len(keys), size):
                found += 1
                length, service, address = abi.SOURCE_RANGE_KEY.unpack(keys[at : at + size])
                record = services.get(service)
                own = record.entry.source_ranges if record else ()
                right &= Network(Address(address), length - SERVICE_ID_BITS) in own
            yield right
        yield self._version != version or found == self.used

    def add(self, service: int, networks: Iterable[Network]) -> None:
        """Add networks, for which the map must have room, and which it must not contain yet.

        They are written one by one, because older kernels have no batches for this type of map.
        """
        for each in networks:
            self._version += 1
            self._map.update(_key(service, each), _ADMITTED)
            self.used += 1

    def remove(self, service: int, networks: Iterable[Network]) -> None:
        """Remove networks, all of which the map must contain."""
        for each in networks:
            self._version += 1
            self._map.delete(_key(service, each))
            self.used -= 1


def _key(service: int, of: Network) -> bytes:
    return abi.SOURCE_RANGE_KEY.pack(SERVICE_ID_BITS + of.length, service, of.address)
