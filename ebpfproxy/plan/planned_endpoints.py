"""The endpoints of a plan, packed: 100,000 of them take 2 MB instead of the 15 MB of tuples.

A row is the beginning of `struct endpoint` in bpf/abi.h, so that backend ebpf writes and compares rows
without converting them.
"""

import functools
import itertools
import struct
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from socket import htons, ntohs
from typing import NamedTuple, overload

from ebpfproxy.model.address import Address

LISTED = 1
CLUSTER = 2
LOCAL = 4
ON_NODE = 8
NODE_UNKNOWN = 16
"""The flags of a row: those of `enum endpoint_flag` in bpf/abi.h. LISTED is always set."""

WEIGHT_SHIFT = 8
"""The upper byte of the flags is the weight; 0 stands for 1."""

ROW = struct.Struct("=16sHH")
"""Address, port in network byte order, flags in the byte order of this machine. The first 18 bytes sort as
address and port."""
_AFTER_ADDRESS = struct.Struct("=HH")
TARGET_SIZE = 18
"""The size of address and port in a row, in bytes."""

_HALVES = ROW.size // 2
_PORT_AT, _FLAGS_AT = 8, 9  # in units of 16 bits


class PlannedEndpoint(NamedTuple):
    """An endpoint of a ServicePort.

    - `cluster`, `local`: whether new connections with that scope may use it. An endpoint in neither scope is
      listed as long as it serves, since established UDP flows to it may continue (kube-proxy's conntrack
      reconciler keeps flows to every serving endpoint, pkg/proxy/conntrack/cleanup.go).
    - `on_node`: whether it runs on this node, None if its EndpointSlice names no node.
    """

    address: Address
    port: int
    cluster: bool
    local: bool
    on_node: bool | None


class PlannedEndpoints(Sequence[PlannedEndpoint]):
    """An immutable sequence of endpoints. Two are equal if their rows are."""

    __slots__ = ("rows",)

    def __init__(self, endpoints: Iterable[PlannedEndpoint] = ()) -> None:
        self.rows = b"".join(
            row(address, port, cluster=cluster, local=local, on_node=on_node)
            for address, port, cluster, local, on_node in endpoints
        )
        """The rows, one after the other, in the order of the sequence."""

    @classmethod
    def packed(cls, rows: bytes) -> "PlannedEndpoints":
        """Return the endpoints with these rows."""
        made = cls.__new__(cls)
        made.rows = rows
        return made

    def targets(self) -> list[bytes]:
        """Return address and port of each endpoint: the first `TARGET_SIZE` bytes of its row."""
        rows = self.rows
        return [rows[at : at + TARGET_SIZE] for at in range(0, len(rows), ROW.size)]

    def flags(self) -> list[int]:
        """Return the flags of each endpoint."""
        return memoryview(self.rows).cast("H")[_FLAGS_AT::_HALVES].tolist() if self.rows else []

    def weights(self) -> list[int]:
        """Return the weight of each endpoint."""
        return [flags >> WEIGHT_SHIFT or 1 for flags in self.flags()]

    def with_weights(self, weights: Sequence[int]) -> "PlannedEndpoints":
        """Return the endpoints with these weights, in their order. Empty: this object, where all have 1."""
        if not weights:
            return self
        packed = bytearray(self.rows)
        halves = memoryview(packed).cast("H")
        for at, weight in zip(range(_FLAGS_AT, len(halves), _HALVES), weights, strict=True):
            halves[at] |= (weight if weight > 1 else 0) << WEIGHT_SHIFT
        return self.packed(bytes(packed))

    def with_ports(self, ports: Mapping[int, int]) -> "PlannedEndpoints":
        """Return the endpoints with other ports, by their present ones. The order of ports must be the same,
        so that the endpoints stay sorted."""
        if all(old == new for old, new in ports.items()):
            return self
        packed = bytearray(self.rows)
        halves = memoryview(packed).cast("H")
        renamed = {htons(old): htons(new) for old, new in ports.items()}
        if len(renamed) == 1:
            changed = array("H", renamed.values()) * len(self)
        else:
            changed = array("H", map(renamed.__getitem__, halves[_PORT_AT::_HALVES].tolist()))
        halves[_PORT_AT::_HALVES] = memoryview(changed)
        return self.packed(bytes(packed))

    def with_flag(self, flag: int) -> "PlannedEndpoints":
        """Return those that have this flag."""
        chosen = itertools.compress(self._rows(), map(flag.__and__, self.flags()))
        return self.packed(b"".join(chosen))

    def without_flag(self, flag: int, targets: Collection[bytes]) -> "PlannedEndpoints":
        """Return all endpoints, those with an address and port of `targets` without this flag."""
        packed = bytearray(self.rows)
        halves = memoryview(packed).cast("H")
        for at, target in zip(range(_FLAGS_AT, len(halves), _HALVES), self.targets(), strict=True):
            if target in targets:
                halves[at] &= ~flag
        return self.packed(bytes(packed))

    def _rows(self) -> Iterator[bytes]:
        return (self.rows[at : at + ROW.size] for at in range(0, len(self.rows), ROW.size))

    def has(self, flag: int) -> bool:
        """Return whether any endpoint has this flag."""
        return any(map(flag.__and__, self.flags()))

    def part(self, start: int, count: int) -> "PlannedEndpoints":
        """Return up to `count` endpoints from number `start` on."""
        return self.packed(self.rows[start * ROW.size : (start + count) * ROW.size])

    def __len__(self) -> int:
        return len(self.rows) // ROW.size

    def __iter__(self) -> Iterator[PlannedEndpoint]:
        return (_endpoint(*fields) for fields in ROW.iter_unpack(self.rows))

    @overload
    def __getitem__(self, index: int) -> PlannedEndpoint: ...
    @overload
    def __getitem__(self, index: slice) -> "PlannedEndpoints": ...
    def __getitem__(self, index: int | slice) -> "PlannedEndpoint | PlannedEndpoints":
        if isinstance(index, slice):
            return PlannedEndpoints(tuple(self)[index])
        at = range(len(self))[index] * ROW.size
        return _endpoint(*ROW.unpack_from(self.rows, at))

    def __eq__(self, other: object) -> bool:
        return self.rows == other.rows if isinstance(other, PlannedEndpoints) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.rows)

    def __repr__(self) -> str:
        return f"PlannedEndpoints({list(self)!r})"


def row(address: Address, port: int, *, cluster: bool, local: bool, on_node: bool | None) -> bytes:
    """Return the row of an endpoint; see `PlannedEndpoint`."""
    return address + _after_address(port, cluster, local, on_node)


@functools.lru_cache(maxsize=4096)
def _after_address(port: int, cluster: bool, local: bool, on_node: bool | None) -> bytes:
    """Cached: most endpoints have the same port and flags."""
    flags = LISTED
    if cluster:
        flags |= CLUSTER
    if local:
        flags |= LOCAL
    if on_node:
        flags |= ON_NODE
    elif on_node is None:
        flags |= NODE_UNKNOWN
    return _AFTER_ADDRESS.pack(htons(port), flags)


def target_of(address: Address, port: int) -> bytes:
    """Return address and port as in `PlannedEndpoints.targets`."""
    return ROW.pack(address, htons(port), 0)[:TARGET_SIZE]


def _endpoint(address: bytes, port: int, flags: int) -> PlannedEndpoint:
    on_node = None if flags & NODE_UNKNOWN else bool(flags & ON_NODE)
    return PlannedEndpoint(Address(address), ntohs(port), bool(flags & CLUSTER), bool(flags & LOCAL), on_node)
