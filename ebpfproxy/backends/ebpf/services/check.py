"""Compares the maps with what `ServiceTable` has written, in steps of about a millisecond.

Changes may be applied between the steps: each step compares with what is written at that time. Only a count
of entries needs a map that does not change during its walk. After a change, each own entry is looked up
instead.

Nothing is decoded or kept. After a difference the caller reads everything (reading.py). While nothing
changes, a digest of the maps is compared instead, which takes less time.
"""

import dataclasses
import zlib
from collections.abc import Callable, Collection, Generator, Iterator
from itertools import islice

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.arrays import Arrays
from ebpfproxy.backends.ebpf.services.record import NOTHING, U32, Record, name_value
from ebpfproxy.backends.ebpf.services.shares import Uses
from ebpfproxy.backends.ebpf.services.slot_lists import digest
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.plan.planned_endpoints import ROW

_WALKED = 512  # entries of a map in one step
_LOOKED_UP = 128  # entries in one step
_ENDPOINTS = 1024  # in one step

_DIGESTED = ("services", "service_names", "frontend_addresses")
"""The hash tables in a digest. The order of entries is that of buckets, so it is the same while nothing
changes."""


@dataclasses.dataclass(slots=True)
class Written:
    """What `ServiceTable` has written, and changes with it. `version` is another number after each change.

    `owner` has each key of `services`, with the ServicePort whose record has its value. `uses`: None until
    they are needed. `verified`: the version and the digest of the maps in which the last check found no
    difference.
    """

    records: dict[ServicePortKey, Record] = dataclasses.field(default_factory=dict)
    owner: dict[bytes, ServicePortKey] = dataclasses.field(default_factory=dict)
    version: int = 0
    uses: Uses | None = None
    verified: tuple[int, int] | None = None

    def service(self, key: bytes) -> bytes | None:
        """The value of a key of `services`, None if it is not an own key."""
        owner = self.owner.get(key)
        record = self.records.get(owner) if owner else None
        return record.services.get(key) if record else None


def check_unless_verified(
    maps: Maps, arrays: Arrays, written: Written, check: Iterator[bool]
) -> Iterator[bool]:
    """Yield what `check` of `_DIGESTED` and the arrays yields. Skip it if neither `written` nor they have
    changed since it found no difference. Raises KernelError.

    The digest is taken before and after the check, so it is one of what the check has compared.
    """
    version = written.version
    before = yield from _digest(maps, arrays)
    if written.verified == (version, before):
        return
    right = True
    for is_right in check:
        right &= is_right
        yield is_right
    if right and written.version == version and before == (yield from _digest(maps, arrays)):
        written.verified = version, before


def _digest(maps: Maps, arrays: Arrays) -> Generator[bool, None, int]:
    """Yield True after each step. Return a CRC of `_DIGESTED` and the arrays. Raises KernelError."""
    digest = 0
    for name in _DIGESTED:
        for keys, values in maps[name].batches(_WALKED):
            digest = zlib.crc32(values, zlib.crc32(keys, digest))
            yield True
    for block in arrays.blocks():
        digest = zlib.crc32(block, digest)
        yield True
    return digest


def check_services(maps: Maps, arrays: Arrays, written: Written) -> Iterator[bool]:
    """Yield after each step whether everything was as written. Raises KernelError."""
    yield from check_hash(maps["services"], written, written.owner, written.service)
    names = _Names(written)
    yield from check_hash(maps["service_names"], written, names.keys, names.value)
    yield from _check_endpoints(arrays, written)
    version, listed = written.version, 0
    for count in arrays.listed_counts():
        listed += count
        yield True
    yield written.version != version or listed == arrays.endpoint_ids.used


def check_hash(
    map_: Map, written: Written, own: Collection[bytes], value_of: Callable[[bytes], bytes | None]
) -> Iterator[bool]:
    """Yield after each step whether the map has exactly the keys `own`, with the values of `value_of`.

    `own` changes with `written`. Raises KernelError.
    """
    version, found = written.version, 0
    key_size, value_size = map_.shape.key_size, map_.shape.value_size
    for keys, values in map_.batches(_WALKED):
        count = len(keys) // key_size
        found += count
        yield all(
            value_of(keys[at * key_size : (at + 1) * key_size])
            == values[at * value_size : (at + 1) * value_size]
            for at in range(count)
        )
    if written.version == version:
        yield found == len(own)
        return
    remaining = iter(list(own))
    while part := list(islice(remaining, _LOOKED_UP)):
        yield all(map_.lookup(key) == value_of(key) for key in part if key in own)


class _Names:
    """The values of `service_names` by key, which is the id of a record. They follow changes of `written`."""

    def __init__(self, written: Written) -> None:
        self._written = written
        self._read()

    def _read(self) -> None:
        self._version = self._written.version
        self.keys = {U32.pack(record.id): key for key, record in self._written.records.items()}

    def value(self, id_: bytes) -> bytes | None:
        if self._version != self._written.version:
            self._read()
        key = self.keys.get(id_)
        return name_value(key) if key else None


def _check_endpoints(arrays: Arrays, written: Written) -> Iterator[bool]:
    """Compare the endpoints and lists of each record."""
    compared, right = 0, True
    for key in list(written.records):
        record = written.records.get(key)
        for count, part_right in _parts(arrays, record) if record else ():
            compared += count
            right &= part_right
            if compared >= _ENDPOINTS:
                yield right
                compared, right = 0, True
                if written.records.get(key) is not record:
                    break
    yield right


def _parts(arrays: Arrays, record: Record) -> Iterator[tuple[int, bool]]:
    """Yield for each part of the endpoints their number, and whether they and their slots are as written.

    An endpoint of a list occupies the next slot of its range, except in an expanded list, which is a part.
    """
    rows, service = record.entry.endpoints.rows, U32.pack(record.id)
    both = (abi.ENDPOINT_CLUSTER, record.cluster), (abi.ENDPOINT_LOCAL, record.local)
    used = [each for each in both if each[1] != NOTHING]  # without a list that no service refers to
    lists = [each for each in used if arrays.expanded(each[1][0]) is None]
    placed = dict.fromkeys((flag for flag, _ in lists), 0)
    for start in range(0, len(record.ids), _ENDPOINTS):
        ids = record.ids[start : start + _ENDPOINTS]
        part = record.entry.endpoints.part(start, len(ids))
        starts = range(start * ROW.size, len(rows), ROW.size)[: len(ids)]
        wanted = service.join([rows[at : at + ROW.size] for at in starts]) + service
        right = b"".join(map(arrays.endpoint, ids)) == wanted
        flags = part.flags()
        for flag, (first, _) in lists:
            members = [id_ for id_, has in zip(ids, flags, strict=True) if has & flag]
            right &= arrays.read_slots((first + placed[flag], len(members))) == members
            placed[flag] += len(members)
        yield len(ids), right
    yield 1, all(placed[flag] == count for flag, (_, count) in lists)
    for _, range_ in used:
        if (known := arrays.expanded(range_[0])) is not None:
            yield range_[1], digest(arrays.read_slots(range_)) == known
