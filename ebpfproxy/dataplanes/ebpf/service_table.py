"""The maps services, service_names, slots and endpoints: entries in, entries out.

How a change comes into force without a reader ever seeing half of it:
1. endpoints that are new, and the new lists of slots, are written where no service points to;
2. each entry of `services` is replaced, which is one atomic step;
3. what the old entries alone pointed to is retired: endpoints lose their flags, so that neither
   affinity nor an unconnected socket goes on using them, and ids and ranges rest for a grace
   period (ranges.py) before they are used again.
"""

import dataclasses
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from socket import htons, ntohs

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.entries import EndpointEntry, FrontendEntry, ServicePortEntry, ServicePortKey
from ebpfproxy.dataplanes.ebpf.maps import Maps
from ebpfproxy.dataplanes.ebpf.ranges import GRACE, Ids, Ranges
from ebpfproxy.errors import KernelError, TableFull
from ebpfproxy.model.address import Address, Family, Protocol, family

Place = tuple[Address, int]
Range = tuple[int, int]

_NOTHING: Range = (0, 0)
_U32 = struct.Struct("=I")
_U16 = struct.Struct("=H")
_FLAGS_AT = abi.ENDPOINT.offset("flags")
_STRIDE = abi.ENDPOINT.size
_SLOT_STRIDE = 8  # an array's elements are 8-byte aligned
_SCAN = 4096
_CONTRADICTION = 1 << 16
"""A flag that no plan asks for, beyond those of the maps: on what is read back and contradicts itself."""

_FAMILIES = {4: Family.IPV4, 6: Family.IPV6}  # by service_name.family


@lru_cache(maxsize=512)
def _slots_format(count: int) -> struct.Struct:
    return struct.Struct("=" + "I4x" * count)


@dataclasses.dataclass(slots=True)
class _Record:
    """What the kernel holds for one ServicePort: ranges, packed `services` entries, and the ids of
    `entry.endpoints`, in the same order."""

    id: int
    entry: ServicePortEntry
    ids: tuple[int, ...] = ()
    cluster: Range = _NOTHING
    local: Range = _NOTHING
    services: dict[bytes, bytes] = dataclasses.field(default_factory=dict)

    def places(self) -> dict[Place, int]:
        """The id of each endpoint, by its address and port."""
        return {
            (address, port): id_
            for (address, port, _), id_ in zip(self.entry.endpoints, self.ids, strict=True)
        }


class ServiceTable:
    """All ServicePorts that the kernel knows. After an error of any method: `read`, and go on from there."""

    def __init__(self, maps: Maps, clock: Callable[[], float]) -> None:
        self._maps = maps
        self._clock = clock
        self._slots = maps["slots"].mapped()
        self._endpoints = maps["endpoints"].mapped()
        self._endpoint_ids = Ids(maps["endpoints"].shape.max_entries)
        self._service_ids = Ids(maps["service_names"].shape.max_entries + 1)
        self._start_over()

    def _start_over(self) -> None:
        self._records: dict[ServicePortKey, _Record] = {}
        self._owner: dict[bytes, ServicePortKey] = {}
        self._ranges = Ranges(self._maps["slots"].shape.max_entries)

    def close(self) -> None:
        self._slots.close()
        self._endpoints.close()

    def usage(self) -> dict[str, tuple[int, int]]:
        """By map: how many entries are in use, and how many it has room for."""
        return {
            "services": (len(self._owner), self._maps["services"].shape.max_entries),
            "slots": (self._ranges.used, self._ranges.capacity),
            "endpoints": (self._endpoint_ids.used, self._endpoint_ids.capacity - 1),
        }

    def ids_of(self, key: ServicePortKey) -> tuple[int, Mapping[Place, int]] | None:
        """A ServicePort's id and those of its endpoints in force; None where the kernel does not hold it."""
        record = self._records.get(key)
        return (record.id, record.places()) if record else None

    # Reading back

    def read(self) -> dict[ServicePortKey, ServicePortEntry]:
        """What the kernel holds. What contradicts itself comes out as something no plan asks for."""
        former = self._ranges
        self._start_over()
        names = dict(self._read_names())
        frontends: dict[int, dict[bytes, bytes]] = defaultdict(dict)
        for key, value in self._maps["services"].items():
            frontends[abi.SERVICE.unpack(value)[2]][key] = value
        endpoints = self._read_endpoints(names.keys() | frontends.keys())
        self._service_ids.adopt(names.keys() | frontends.keys())
        for id_ in names.keys() | frontends.keys():
            key_ = names.get(id_) or self._nameless(id_, frontends[id_])
            if key_ in self._records:  # two ids of one name: keep the first, drop the other
                key_ = ServicePortKey(f"?/{id_}", key_.protocol, key_.family)
            self._adopt(key_, id_, frontends.get(id_, {}), endpoints.get(id_, []))
        self._ranges.inherit(former)
        return {key: record.entry for key, record in self._records.items()}

    def _read_names(self) -> Iterable[tuple[int, ServicePortKey]]:
        for key, value in self._maps["service_names"].items():
            text, protocol, version = abi.SERVICE_NAME.unpack(value)
            name = text.rstrip(b"\0").decode(errors="replace")
            (id_,) = _U32.unpack(key)
            try:
                if not 0 < id_ < self._service_ids.capacity:
                    raise ValueError(f"{id_} is no id that we give")
                yield id_, ServicePortKey(name, Protocol(protocol), _FAMILIES[version])
            except (KeyError, ValueError):  # a foreign writer's: to be dropped, with all that has this id
                yield id_, ServicePortKey(f"?/{id_}", Protocol.TCP, Family.IPV4)

    @staticmethod
    def _nameless(id_: int, frontends: Mapping[bytes, bytes]) -> ServicePortKey:
        address, _, protocol, _ = abi.SERVICE_KEY.unpack(next(iter(frontends)))
        try:
            return ServicePortKey(f"?/{id_}", Protocol(protocol), family(address))
        except ValueError:
            return ServicePortKey(f"?/{id_}/{protocol}", Protocol.TCP, family(address))

    def _read_endpoints(self, services: Iterable[int]) -> dict[int, list[tuple[int, EndpointEntry]]]:
        """Those in force, by service id; whose service is unknown are retired on the way."""
        known = set(services)
        found: dict[int, list[tuple[int, EndpointEntry]]] = defaultdict(list)
        taken: set[int] = set()
        empty = bytes(_SCAN * _STRIDE)
        for start in range(0, self._endpoint_ids.capacity, _SCAN):
            block = self._endpoints[start * _STRIDE : (start + _SCAN) * _STRIDE]
            if block == empty[: len(block)]:
                continue
            rows = abi.ENDPOINT.iter_unpack(block[: len(block) // _STRIDE * _STRIDE])
            for id_, (address, port, flags, service) in enumerate(rows, start):
                if not flags & abi.ENDPOINT_LISTED or id_ == 0 or id_ >= self._endpoint_ids.capacity:
                    continue
                if service in known:
                    taken.add(id_)
                    found[service].append((id_, EndpointEntry(address, ntohs(port), flags)))
                else:
                    self._set_flags(id_, 0)
        self._endpoint_ids.adopt(taken)
        return found

    def _adopt(
        self,
        key: ServicePortKey,
        id_: int,
        services: dict[bytes, bytes],
        endpoints: list[tuple[int, EndpointEntry]],
    ) -> None:
        record = _Record(id_, ServicePortEntry((), (), 0), services=services)
        now = self._clock()
        frontends: list[FrontendEntry] = []
        timeouts: set[int] = set()
        seen = {"cluster": False, "local": False}
        for packed_key, value in services.items():
            self._owner[packed_key] = key
            *ranges, _, timeout, flags, kind, _ = abi.SERVICE.unpack(value)
            timeouts.add(timeout)
            scopes = (
                "local" if flags & abi.SERVICE_INTERNAL_LOCAL else "cluster",
                "local" if flags & abi.SERVICE_EXTERNAL_LOCAL else "cluster",
            )
            agrees = True
            for scope, packed in zip(scopes, ranges, strict=True):
                agrees &= self._adopt_range(record, scope, abi.SLOT_RANGE.unpack(packed), seen, now)
            address, port, protocol, _ = abi.SERVICE_KEY.unpack(packed_key)
            flags |= 0 if agrees else _CONTRADICTION
            frontends.append(FrontendEntry(address, ntohs(port), protocol, kind, flags))
        listed = self._adopt_endpoints(record, endpoints, seen, now)
        record.ids = tuple(id_ for _, id_ in listed)
        if len(timeouts) > 1 or not self._lists_are_whole(record):
            frontends = [each._replace(flags=each.flags | _CONTRADICTION) for each in frontends]
        timeout = max(timeouts, default=0)
        record.entry = ServicePortEntry(tuple(sorted(frontends)), tuple(e for e, _ in listed), timeout)
        self._records[key] = record

    def _adopt_range(
        self, record: _Record, scope: str, found: Range, seen: dict[str, bool], now: float
    ) -> bool:
        """Whether this frontend agrees with those before it about the list of this scope."""
        first, count = found
        if not seen[scope]:
            seen[scope] = True
            if count and not (first + count <= self._ranges.capacity and self._ranges.reserve(first, count)):
                return False
            setattr(record, scope, found if count else _NOTHING)
            return True
        if found == getattr(record, scope) or (not count and getattr(record, scope) == _NOTHING):
            return True
        if count and first + count <= self._ranges.capacity and self._ranges.reserve(first, count):
            self._ranges.release(first, count, now)  # of an update that was cut short: still in use
        return False

    def _adopt_endpoints(
        self,
        record: _Record,
        endpoints: list[tuple[int, EndpointEntry]],
        seen: Mapping[str, bool],
        now: float,
    ) -> list[tuple[EndpointEntry, int]]:
        """The endpoints, sorted. One whose flags are not those of the lists that name it is marked so."""
        lists = {
            abi.ENDPOINT_CLUSTER: set(self._read_slots(record.cluster)) if seen["cluster"] else None,
            abi.ENDPOINT_LOCAL: set(self._read_slots(record.local)) if seen["local"] else None,
        }
        found: dict[Place, tuple[EndpointEntry, int]] = {}
        for id_, (address, port, flags) in endpoints:
            if (address, port) in found:
                self._set_flags(id_, 0)
                self._endpoint_ids.release(id_, now)
                continue
            for bit, members in lists.items():
                if members is not None and (id_ in members) != bool(flags & bit):
                    flags |= _CONTRADICTION
            found[address, port] = EndpointEntry(address, port, flags), id_
        return sorted(found.values())

    def _lists_are_whole(self, record: _Record) -> bool:
        """Whether both lists name endpoints of this ServicePort only, and none twice."""
        ids = set(record.ids)
        lists = self._read_slots(record.cluster), self._read_slots(record.local)
        return all(len(slots) == len(ids.intersection(slots)) for slots in lists)

    def _read_slots(self, range_: Range) -> tuple[int, ...]:
        first, count = range_
        return _slots_format(count).unpack_from(self._slots, first * _SLOT_STRIDE) if count else ()

    # Writing

    def apply(
        self, puts: Mapping[ServicePortKey, ServicePortEntry], drops: Iterable[ServicePortKey]
    ) -> tuple[dict[ServicePortKey, KernelError], set[Place]]:
        """What has no room, and which places UDP endpoints were at that are in force no more.

        A ServicePort that has no room keeps what it had.
        """
        now = self._clock()
        staged: dict[ServicePortKey, tuple[_Record | None, _Record]] = {}
        refused: dict[ServicePortKey, KernelError] = {}
        room = self._maps["services"].shape.max_entries - len(self._owner)
        for key, entry in puts.items():
            old = self._records.get(key)
            try:
                left = self._check_room(key, entry, room)
                staged[key] = old, self._stage(key, old, entry, now)
                room = left
            except TableFull as failure:
                refused[key] = failure
        dropped = {key: self._records[key] for key in drops if key in self._records}
        self._commit(staged, dropped)
        now = self._clock()  # from here on nobody finds what is retired
        gone: set[Place] = set()
        for key, (old, new) in staged.items():
            self._records[key] = new
            gone |= self._retire(key, old, new, now)
        for key, record in dropped.items():
            del self._records[key]
            gone |= self._retire(key, record, None, now)
        self._forget_affinity(
            {old.id for old, new in staged.values() if old and _loses_affinity(old, new)}
            | {record.id for record in dropped.values() if _loses_affinity(record, None)}
        )
        return refused, gone

    def _check_room(self, key: ServicePortKey, entry: ServicePortEntry, room: int) -> int:
        """The room left in `services` after this entry. Raises TableFull."""
        fresh = sum(_service_key(frontend) not in self._owner for frontend in entry.frontends)
        if fresh > room:
            capacity = self._maps["services"].shape.max_entries
            raise _full("services", key, capacity - room + fresh, capacity)
        return room - fresh

    def _stage(
        self, key: ServicePortKey, old: _Record | None, entry: ServicePortEntry, now: float
    ) -> _Record:
        """Write all that no reader can find yet. Raises TableFull, with nothing kept."""
        id_ = old.id if old else self._service_ids.allocate(now)
        if id_ is None:
            raise _full("service_names", key, self._service_ids.used + 1, self._service_ids.capacity - 1)
        new = _Record(id_, entry)
        taken: list[int] = []
        ranges: list[Range] = []
        try:
            self._stage_endpoints(key, old, new, taken, now)
            new.cluster = self._stage_list(key, old, new, abi.ENDPOINT_CLUSTER, ranges, now)
            new.local = self._stage_list(key, old, new, abi.ENDPOINT_LOCAL, ranges, now)
        except TableFull:
            for endpoint in taken:
                self._set_flags(endpoint, 0)
                self._endpoint_ids.undo(endpoint)
            for first, count in ranges:
                self._ranges.undo(first, count)
            if not old:
                self._service_ids.undo(id_)
            raise
        new.services = {_service_key(f): _service_value(f, new) for f in entry.frontends}
        return new

    def _stage_endpoints(
        self, key: ServicePortKey, old: _Record | None, new: _Record, taken: list[int], now: float
    ) -> None:
        former = old.places() if old else {}
        ids: list[int] = []
        for address, port, flags in new.entry.endpoints:
            id_ = former.get((address, port))
            if id_ is None:
                id_ = self._endpoint_ids.allocate(now)
                if id_ is None:
                    used, capacity = self.usage()["endpoints"]
                    fresh = sum(endpoint[:2] not in former for endpoint in new.entry.endpoints)
                    raise _full("endpoints", key, used - len(taken) + fresh, capacity)
                taken.append(id_)
                abi.ENDPOINT.pack_into(self._endpoints, id_ * _STRIDE, address, htons(port), flags, new.id)
            ids.append(id_)
        new.ids = tuple(ids)

    def _stage_list(
        self,
        key: ServicePortKey,
        old: _Record | None,
        new: _Record,
        bit: int,
        ranges: list[Range],
        now: float,
    ) -> Range:
        """The range that holds the endpoints with this flag: the old one if it is the same list."""
        ids = [id_ for (*_, flags), id_ in zip(new.entry.endpoints, new.ids, strict=True) if flags & bit]
        if not ids:
            return _NOTHING
        if old:
            former = old.cluster if bit == abi.ENDPOINT_CLUSTER else old.local
            if former[1] == len(ids) and list(self._read_slots(former)) == ids:
                return former
        first = self._ranges.allocate(len(ids), now)
        if first is None:
            used, capacity = self.usage()["slots"]
            raise _full("slots", key, used + (1 << Ranges.order_of(len(ids))), capacity)
        ranges.append((first, len(ids)))
        _slots_format(len(ids)).pack_into(self._slots, first * _SLOT_STRIDE, *ids)
        return first, len(ids)

    def _commit(
        self,
        staged: Mapping[ServicePortKey, tuple[_Record | None, _Record]],
        dropped: Mapping[ServicePortKey, _Record],
    ) -> None:
        names = [(_U32.pack(new.id), _name_value(key)) for key, (old, new) in staged.items() if not old]
        self._maps["service_names"].update_all(names)
        values: list[tuple[bytes, bytes]] = []
        leaving: list[tuple[bytes, ServicePortKey]] = []
        for key, (old, new) in staged.items():
            self._gain_flags(old, new)
            former = old.services if old else {}
            for packed, value in new.services.items():
                if former.get(packed) != value or self._owner.get(packed) != key:
                    values.append((packed, value))
                self._owner[packed] = key
            leaving += [(packed, key) for packed in former if packed not in new.services]
        for key, record in dropped.items():
            leaving += [(packed, key) for packed in record.services]
        self._maps["services"].update_all(values)
        for packed, key in leaving:
            if self._owner.get(packed) == key:  # not taken over by another ServicePort meanwhile
                self._maps["services"].delete(packed)
                del self._owner[packed]
        for record in dropped.values():
            self._maps["service_names"].delete(_U32.pack(record.id))

    def _gain_flags(self, old: _Record | None, new: _Record) -> None:
        """What an endpoint may newly be used for; what it may no longer, it loses when it is retired."""
        if not old:
            return
        for (*_, flags), id_ in zip(new.entry.endpoints, new.ids, strict=True):
            present = self._flags(id_)
            if flags & ~present:
                self._set_flags(id_, flags | present)

    def _retire(
        self, key: ServicePortKey, old: _Record | None, new: _Record | None, now: float
    ) -> set[Place]:
        """Take back what only `old` used; the places of UDP endpoints that went."""
        if not old:
            return set()
        if new:
            for (*_, flags), id_ in zip(new.entry.endpoints, new.ids, strict=True):
                if self._flags(id_) != flags:
                    self._set_flags(id_, flags)
        kept_ids = frozenset(new.ids) if new else frozenset()
        gone = {place: id_ for place, id_ in old.places().items() if id_ not in kept_ids}
        for id_ in gone.values():
            self._set_flags(id_, 0)
            self._endpoint_ids.release(id_, now)
        for range_, kept in ((old.cluster, new and new.cluster), (old.local, new and new.local)):
            if range_ != _NOTHING and range_ != kept:
                self._ranges.release(*range_, now)
        if not new:
            self._service_ids.release(old.id, now)
        return set(gone) if key.protocol is Protocol.UDP else set()

    def _forget_affinity(self, services: set[int]) -> None:
        """Affinity that is turned off and on again starts anew."""
        if not services:
            return
        affinity = self._maps["affinity"]
        at = abi.AFFINITY_KEY.offset("service_id")
        for key, _ in list(affinity.items()):
            if _U32.unpack_from(key, at)[0] in services:
                affinity.delete(key)

    def _flags(self, endpoint: int) -> int:
        return int(_U16.unpack_from(self._endpoints, endpoint * _STRIDE + _FLAGS_AT)[0])

    def _set_flags(self, endpoint: int, flags: int) -> None:
        _U16.pack_into(self._endpoints, endpoint * _STRIDE + _FLAGS_AT, flags)


def _loses_affinity(old: _Record, new: _Record | None) -> bool:
    return bool(old.entry.affinity_timeout and not (new and new.entry.affinity_timeout))


def _service_key(frontend: FrontendEntry) -> bytes:
    return abi.SERVICE_KEY.pack(frontend.address, htons(frontend.port), frontend.protocol, 0)


def _service_value(frontend: FrontendEntry, of: _Record) -> bytes:
    flags = frontend.flags
    internal = of.local if flags & abi.SERVICE_INTERNAL_LOCAL else of.cluster
    external = of.local if flags & abi.SERVICE_EXTERNAL_LOCAL else of.cluster
    return abi.SERVICE.pack(
        abi.SLOT_RANGE.pack(*internal),
        abi.SLOT_RANGE.pack(*external),
        *(of.id, of.entry.affinity_timeout, flags, frontend.kind, 0),
    )


def _name_value(key: ServicePortKey) -> bytes:
    text = key.name.encode()[: abi.CONSTANTS["SERVICE_NAME_SIZE"] - 1]
    return abi.SERVICE_NAME.pack(text, key.protocol, 4 if key.family is Family.IPV4 else 6)


def _full(map_: str, key: ServicePortKey, needed: int, capacity: int) -> TableFull:
    option = {"service_names": "services"}.get(map_, map_)
    return TableFull(
        f"{key.name}: map {map_} is full: it has room for {capacity} entries, {needed} are needed",
        f"raise --ebpf-{option}-max; what was freed by a change has room again after {GRACE:g} s",
    )
