"""The map `frontend_addresses`: each address that some key of `services` has, since pings to it are answered.

The address of NodePorts is none: it stands for the node's own addresses, which answer by themselves.
"""

from collections import Counter
from collections.abc import Iterable

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.service_record import U32
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.model.address import Address, is_unspecified

_PRESENT = U32.pack(1)
_AT = abi.SERVICE_KEY.offset("address")
_SIZE = 16


class FrontendAddresses:
    """Counts for each address how many keys of `services` have it."""

    def __init__(self, map_: Map) -> None:
        self._map = map_
        self._uses: Counter[Address] = Counter()

    def read(self, services: Iterable[bytes]) -> None:
        """Set the map right for these keys of `services`: it says nothing that they do not."""
        self._uses = Counter(_addresses(services))
        found = dict(self._map.items())
        for address in found.keys() - self._uses.keys():
            self._map.delete(address)
        self._put(address for address in self._uses if found.get(address) != _PRESENT)

    def add(self, services: Iterable[bytes]) -> None:
        """Before these keys are written to `services`, which has none of them yet."""
        added = Counter(_addresses(services))
        self._put(address for address in added if not self._uses[address])
        self._uses.update(added)

    def remove(self, services: Iterable[bytes]) -> None:
        """After these keys were deleted from `services`."""
        for address in _addresses(services):
            self._uses[address] -= 1
            if not self._uses[address]:
                del self._uses[address]
                self._map.delete(address)

    def _put(self, addresses: Iterable[Address]) -> None:
        self._map.update_all([(address, _PRESENT) for address in addresses])


def _addresses(services: Iterable[bytes]) -> Iterable[Address]:
    every = (Address(key[_AT : _AT + _SIZE]) for key in services)
    return (address for address in every if not is_unspecified(address))
