"""The map `frontend_addresses`: for each address of a frontend, the clients that get replies to pings.

A client gets a reply if some frontend of the address has an endpoint for it, or rejects its packets. It gets
no reply if every frontend drops its packets. With policy Local, a node without a local endpoint drops them.

Source ranges are ignored, since they restrict ports, and ICMP has none. kube-proxy's IPVS mode also replies
to pings of clients outside them: KUBE-LOAD-BALANCER-FW and KUBE-LOAD-BALANCER-SOURCE-CIDR match protocol and
port.

The unspecified address, which is that of NodePorts, has no entry. It represents the node's own addresses, and
the kernel replies to pings of these.
"""

from collections.abc import Iterable, Iterator, Mapping

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.services.check import Written, check_hash
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, is_unspecified

_AT = abi.SERVICE_KEY.offset("address")
_SIZE = 16

Entries = Iterable[tuple[bytes, bytes]]
"""Keys and values of `services`."""


class FrontendAddresses:
    """Counts for each address the frontends that serve each kind of clients."""

    def __init__(self, map_: Map) -> None:
        self._map = map_
        self._recorded: dict[bytes, int] = {}  # by key of `services`: the clients
        self._frontends = _no_frontends()
        self._written: dict[Address, int] = {}

    def read(self, services: Entries) -> None:
        """Bring the map in sync with `services`, which contains exactly these entries. Raises KernelError."""
        self._recorded, self._frontends = {}, _no_frontends()
        for address, key, clients in _served(services):
            self._count(address, key, clients)
        addresses = frozenset().union(*self._frontends.values())
        wanted = {address: self._clients(address) for address in addresses}
        found = dict(self._map.items())
        for packed in found.keys() - wanted.keys():
            self._map.delete(packed)
        values: dict[bytes, bytes] = {address: _pack(clients) for address, clients in wanted.items()}
        self._map.update_all(
            [(packed, value) for packed, value in values.items() if found.get(packed) != value]
        )
        self._written = wanted

    def extend(self, services: Entries) -> None:
        """Add the clients of these entries. Call it before they are written to `services`.

        Raises KernelError.
        """
        wanted: dict[Address, int] = {}
        for address, _, clients in _served(services):
            wanted[address] = wanted.get(address, self._written.get(address, 0)) | clients
        self._write(wanted)

    def settle(self, services: Entries, gone: Iterable[bytes]) -> None:
        """Remove clients that no frontend serves any more. Raises KernelError.

        Call it after these entries were written to `services` and the keys `gone` were deleted.
        """
        changed: set[Address] = set()
        for address, key, clients in _served(services):
            self._count(address, key, clients)
            changed.add(address)
        for key in gone:
            address = _address(key)
            self._count(address, key, 0)
            changed.add(address)
        self._write({address: self._clients(address) for address in changed})

    def check(self, written: Written) -> Iterator[bool]:
        """See `check_hash`."""
        return check_hash(self._map, written, self._written, self._value_of)

    def _value_of(self, packed: bytes) -> bytes | None:
        clients = self._written.get(Address(packed))
        return None if clients is None else _pack(clients)

    def _count(self, address: Address, key: bytes, clients: int) -> None:
        """Record the clients that a frontend serves, 0 for a deleted one."""
        previous = self._recorded.pop(key, 0)
        if clients:
            self._recorded[key] = clients
        for client, frontends in self._frontends.items():
            number = frontends.pop(address, 0) + bool(clients & client) - bool(previous & client)
            if number:
                frontends[address] = number

    def _clients(self, address: Address) -> int:
        """The clients of all frontends with this address."""
        return sum(client for client, frontends in self._frontends.items() if address in frontends)

    def _write(self, wanted: Mapping[Address, int]) -> None:
        changed = {a: clients for a, clients in wanted.items() if clients != self._written.get(a, 0)}
        self._map.update_all([(address, _pack(clients)) for address, clients in changed.items() if clients])
        for address, clients in changed.items():
            if clients:
                self._written[address] = clients
            else:
                self._map.delete(address)
                del self._written[address]


def _no_frontends() -> dict[int, dict[Address, int]]:
    """For each kind of clients, the number of frontends that serve them, by address: none."""
    return {abi.PING_FROM_INSIDE: {}, abi.PING_FROM_OUTSIDE: {}, abi.PING_TO_CLUSTER_IP: {}}


def clients_served(value: bytes) -> int:
    """The clients (abi.h's enum ping_client) whose packets a frontend with this value in `services` does not
    drop, with PING_TO_CLUSTER_IP if it is a ClusterIP and there are any."""
    internal, external, _, _, flags, kind, *_ = abi.SERVICE.unpack(value)
    rejects = flags & abi.SERVICE_REJECT
    clients = 0
    if rejects or _count(internal):
        clients |= abi.PING_FROM_INSIDE
    if rejects or _count(external):
        clients |= abi.PING_FROM_OUTSIDE
    if clients and kind == abi.CONSTANTS["KIND_CLUSTER_IP"]:
        clients |= abi.PING_TO_CLUSTER_IP
    return clients


def _count(range_: bytes) -> int:
    """The number of endpoints in a packed slot_range."""
    return int(abi.SLOT_RANGE.unpack(range_)[1])


def _address(key: bytes) -> Address:
    return Address(key[_AT : _AT + _SIZE])


def _served(services: Entries) -> Iterable[tuple[Address, bytes, int]]:
    """Address, key and clients of each entry that is not a NodePort."""
    for key, value in services:
        address = _address(key)
        if not is_unspecified(address):
            yield address, key, clients_served(value)


def _pack(clients: int) -> bytes:
    return abi.FRONTEND_ADDRESS.pack(clients)
