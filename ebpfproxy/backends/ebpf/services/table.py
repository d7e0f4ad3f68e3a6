"""Reads and writes the entries of ServicePorts in the maps.

A change has three steps, so that no reader sees an incomplete change:
1. New endpoints and new lists of slots are written to entries that no service refers to. New source ranges,
   and new addresses and ports of frontends, are added to the old ones. So are clients whose pings get
   replies.
2. Each entry of `services` is replaced, which is one atomic step.
3. What only the old entries refer to is cleaned up. Endpoints lose their flags, so neither affinity nor an
   unconnected socket continues to use them. Ids and ranges rest for a grace period (slot_ranges.py) before
   they are used again. Old source ranges, addresses and ports are deleted.

The id of a deleted service is used for another one later. Its traffic counters are set to zero then, and its
session affinity is deleted.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.arrays import Arrays
from ebpfproxy.backends.ebpf.services.check import Written, check_services, check_unless_verified
from ebpfproxy.backends.ebpf.services.counted_endpoints import CountedEndpoints
from ebpfproxy.backends.ebpf.services.frontend_addresses import FrontendAddresses
from ebpfproxy.backends.ebpf.services.grace import Grace
from ebpfproxy.backends.ebpf.services.large_tables import LargeTables
from ebpfproxy.backends.ebpf.services.new_endpoints import NewEndpoints
from ebpfproxy.backends.ebpf.services.ports import ServicePorts
from ebpfproxy.backends.ebpf.services.reading import Reading
from ebpfproxy.backends.ebpf.services.record import NOTHING, U32, Record, name_value
from ebpfproxy.backends.ebpf.services.shares import in_turns
from ebpfproxy.backends.ebpf.services.slot_ranges import Ids
from ebpfproxy.backends.ebpf.services.source_ranges import SourceRanges
from ebpfproxy.backends.ebpf.services.staging import Change, Room, Staging, sources_beyond
from ebpfproxy.backends.ebpf.services.tunnels import Tunnels
from ebpfproxy.errors import KernelError, NotYet
from ebpfproxy.linux.bpf.bpf import possible_cpus
from ebpfproxy.plan.planned_endpoints import WEIGHT_SHIFT

_IN_LISTS = (1 << WEIGHT_SHIFT) - 1  # flags without the weight
_WALK = 4096  # entries per batch
_NO_TRAFFIC = bytes((abi.TRAFFIC.size + 7) // 8 * 8)


class ServiceTable:
    """All ServicePorts in the maps. After an error of any method, call `read`."""

    def __init__(self, maps: Maps, clock: Callable[[], float]) -> None:
        self._maps = maps
        self._clock = clock
        self._grace = Grace()
        self._arrays = Arrays(maps, self._grace.end)
        self._service_ids = Ids(maps["service_names"].shape.max_entries + 1, self._grace.end)
        self._sources = SourceRanges(maps["source_ranges"])
        self._addresses = FrontendAddresses(maps["frontend_addresses"])
        self._ports = ServicePorts(maps["service_ports"])
        self._counted = CountedEndpoints(maps["connections"])
        self._new = NewEndpoints(maps["new_endpoints"])
        self._tunnels = Tunnels(maps)
        self._large_tables = LargeTables(clock)
        self._no_traffic = _NO_TRAFFIC * possible_cpus()
        self._written = Written()
        self._records, self._owner = self._written.records, self._written.owner
        # Ids of services without affinity that may have entries in `affinity`. None: any id.
        self._affinity_left: set[int] | None = None

    def close(self) -> None:
        self._grace.close()
        self._arrays.close()
        self._ports.close()

    def usage(self) -> dict[str, tuple[int, int]]:
        """The number of entries in use and the capacity, by map."""
        return {
            "services": (len(self._owner), self._maps["services"].shape.max_entries),
            **self._arrays.usage(),
            "source_ranges": (self._sources.used, self._sources.capacity),
        }

    def read(self) -> dict[ServicePortKey, ServicePortEntry]:
        """The entries in the maps. Inconsistent contents result in an entry that differs from every plan."""
        found = Reading(self._maps, self._arrays, self._service_ids, self._sources, self._clock)
        self._tunnels.read(found.records.values())
        _share_entries(found.records, self._records)
        self._written = Written(found.records, found.owner)
        self._records, self._owner = self._written.records, self._written.owner
        self._affinity_left = None
        self._counted.read(id_ for each in self._records.values() if _is_counted(each) for id_ in each.ids)
        self._new.read(self._records.values())
        self._ports.read(self._owner)
        self._addresses.read(each for record in self._records.values() for each in record.services.items())
        return {key: record.entry for key, record in self._records.items()}

    def check(self) -> Iterator[bool]:
        """Compare the maps with what was written, in steps of about a millisecond.

        Yields after each step whether it found no difference. `apply` may be called between the steps. A
        `read` ends the check. Raises KernelError.
        """
        written = self._written
        digested = itertools.chain(
            check_services(self._maps, self._arrays, written), self._addresses.check(written)
        )
        steps = itertools.chain(
            check_unless_verified(self._maps, self._arrays, written, digested),
            self._ports.check(),
            self._sources.check(written),
            self._tunnels.check(written),
        )
        while self._written is written and (is_right := next(steps, None)) is not None:
            yield is_right

    def maintain(self) -> None:
        """End slow start where its time has passed. Call it every few seconds."""
        self._new.expire()
        self._large_tables.expire()

    def apply(
        self,
        puts: Mapping[ServicePortKey, ServicePortEntry],
        drops: Collection[ServicePortKey],
        seconds: float = math.inf,
    ) -> dict[ServicePortKey, KernelError]:
        """Apply a change. Return the ServicePorts without room. They keep their current state, or get one
        that needs less; what they no longer have is removed in any case.

        `seconds`: after this time, further ServicePorts are postponed (NotYet) and keep their current state,
        except those that take over a frontend. If it is finite, large tables are computed in parts.
        """
        self._written.version += bool(puts or drops)
        changes, rejected = self._stage(puts, seconds)
        dropped = {key: self._records[key] for key in drops if key in self._records}
        self._commit(changes, dropped)
        now = self._clock()  # from now on no lookup finds what is removed
        for key, (old, new) in changes.items():
            self._records[key] = new
            self._release(old, new, now)
        for key, record in dropped.items():
            del self._records[key]
            if self._written.uses:
                self._written.uses.replace(key, record, None)
            self._release(record, None, now)
            self._large_tables.end(key)
        for key, failure in rejected.items():
            failure.in_force = key in self._records
        if self._affinity_left is not None:
            self._affinity_left |= {
                old.id for old, new in changes.values() if old and _gains_affinity(new, old)
            }
            self._affinity_left |= {each.id for each in dropped.values() if each.entry.affinity_timeout}
        return rejected

    def _stage(
        self, puts: Mapping[ServicePortKey, ServicePortEntry], seconds: float
    ) -> tuple[dict[ServicePortKey, Change], dict[ServicePortKey, KernelError]]:
        """Return the changes, and what is rejected."""
        services, sources = (Room(name, *self.usage()[name]) for name in ("services", "source_ranges"))
        now, in_parts = self._clock(), not math.isinf(seconds)
        tables = self._large_tables if in_parts else None
        staging = Staging(self._arrays, self._service_ids, self._written, services, sources, now, tables)
        rejected: dict[ServicePortKey, KernelError] = {}
        for number, key in enumerate(in_turns(puts) if in_parts else puts):
            entry = puts[key]
            if number and self._clock() >= now + seconds and not staging.takes_over(key, entry):
                rejected[key] = NotYet(f"{key.name}: the change takes too long")
            elif failure := staging.add(key, entry):
                rejected[key] = failure
        for key, failure in rejected.items():
            if isinstance(failure, NotYet):
                failure.has_begun = self._large_tables.has_begun(key)
        return staging.changes, rejected

    def _commit(
        self, changes: Mapping[ServicePortKey, Change], dropped: Mapping[ServicePortKey, Record]
    ) -> None:
        self._prepare(changes)
        values: list[tuple[bytes, bytes]] = []
        leaving: list[tuple[bytes, ServicePortKey]] = []
        for key, (old, new) in changes.items():
            self._gain_flags(old, new)
            previous = old.services if old else {}
            for packed, value in new.services.items():
                if previous.get(packed) != value or self._owner.get(packed) != key:
                    values.append((packed, value))
                self._owner[packed] = key
            leaving += [(packed, key) for packed in previous if packed not in new.services]
        for key, record in dropped.items():
            leaving += [(packed, key) for packed in record.services]
        self._addresses.extend(values)
        self._maps["services"].update_all(values)
        self._addresses.settle(values, self._delete_services(leaving))
        for record in dropped.values():
            self._maps["service_names"].delete(U32.pack(record.id))

    def _prepare(self, changes: Mapping[ServicePortKey, Change]) -> None:
        """Write what a program looks up in addition to the entry of `services`. Call it before that is
        written."""
        self._forget_affinity({new.id for old, new in changes.values() if _gains_affinity(old, new)})
        added = [(key, new.id) for key, (old, new) in changes.items() if not old]
        traffic = self._maps["traffic"]
        for _, id_ in added:
            if id_ < traffic.shape.max_entries:
                traffic.update(U32.pack(id_), self._no_traffic)
        for old, new in changes.values():
            if _is_counted(new):
                self._counted.add(new.ids)
            self._new.change(old, new)
            self._sources.add(new.id, sources_beyond(new.entry, old.entry if old else None))
            self._tunnels.add(new)
        self._maps["service_names"].update_all([(U32.pack(id_), name_value(key)) for key, id_ in added])
        packed = {packed for _, new in changes.values() for packed in new.services}
        self._ports.add({each for each in packed if each not in self._owner})

    def _delete_services(self, leaving: Iterable[tuple[bytes, ServicePortKey]]) -> list[bytes]:
        """Delete keys from `services`. Returns those that were deleted."""
        gone: list[bytes] = []
        for packed, key in leaving:
            if self._owner.get(packed) == key:  # not taken over by another ServicePort meanwhile
                self._maps["services"].delete(packed)
                del self._owner[packed]
                self._ports.remove((packed,))
                gone.append(packed)
        return gone

    def _gain_flags(self, old: Record | None, new: Record) -> None:
        """Add new flags to endpoints. `_release` removes old flags later."""
        if not old:
            return
        for flags, id_ in zip(new.entry.endpoints.flags(), new.ids, strict=True):
            present = self._arrays.flags(id_)
            if flags & ~present:
                self._arrays.set_flags(id_, flags | present & _IN_LISTS)

    def _release(self, old: Record | None, new: Record | None, now: float) -> None:
        """Release what only `old` used."""
        if not old:
            return
        if new:
            for flags, id_ in zip(new.entry.endpoints.flags(), new.ids, strict=True):
                if self._arrays.flags(id_) != flags:
                    self._arrays.set_flags(id_, flags)
        kept_ids = frozenset(new.ids) if new else frozenset()
        self._new.remove(id_ for id_ in old.ids if id_ not in kept_ids)
        if _is_counted(old):
            counted = kept_ids if new and _is_counted(new) else frozenset()
            self._counted.remove(id_ for id_ in old.ids if id_ not in counted)
        for id_ in dict.fromkeys(id_ for id_ in old.ids if id_ not in kept_ids):
            self._arrays.set_flags(id_, 0)
            self._arrays.endpoint_ids.release(id_, now)
        for range_, kept in ((old.cluster, new and new.cluster), (old.local, new and new.local)):
            if range_ in (NOTHING, kept):
                continue
            if new and kept and kept[1] and kept[0] == range_[0]:
                self._arrays.ranges.shrink(range_[0], old.places(range_), new.places(kept), now)
            else:
                self._arrays.ranges.release(range_[0], old.places(range_), now)
        self._sources.remove(old.id, sources_beyond(old.entry, new.entry if new else None))
        self._tunnels.remove(old, new)
        if not new:
            self._service_ids.release(old.id, now)

    def _forget_affinity(self, gaining: set[int]) -> None:
        """Before these ids of services get affinity, delete what is left under them.

        It is left there until now, because a walk over the map takes up to 100 ms, and few ids get affinity
        again.
        """
        if not gaining or (self._affinity_left is not None and gaining.isdisjoint(self._affinity_left)):
            return
        keep = {record.id for record in self._records.values() if record.entry.affinity_timeout}
        affinity = self._maps["affinity"]
        size, at = abi.AFFINITY_KEY.size, abi.AFFINITY_KEY.offset("service_id")
        left: list[bytes] = []
        for keys, _ in affinity.batches(_WALK):
            ids = memoryview(keys).cast("I")[at // 4 :: size // 4].tolist()
            left += [keys[i * size : (i + 1) * size] for i, id_ in enumerate(ids) if id_ not in keep]
        for key in left:
            affinity.delete(key)
        self._affinity_left = set()


def _share_entries(found: Mapping[ServicePortKey, Record], known: Mapping[ServicePortKey, Record]) -> None:
    """Give records that were read the equal entries that are already in memory."""
    for key, record in found.items():
        if key in known and record.entry == known[key].entry:
            record.entry = known[key].entry


def _is_counted(record: Record) -> bool:
    return record.entry.algorithm == abi.ALGORITHM_LEAST_CONNECTIONS


def _gains_affinity(old: Record | None, new: Record) -> bool:
    return bool(new.entry.affinity_timeout and not (old and old.entry.affinity_timeout))
