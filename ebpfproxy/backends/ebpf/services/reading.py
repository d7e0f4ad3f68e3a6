"""Reads the entries of ServicePorts back from the maps.

Inconsistent contents result in an entry that differs from every plan, so that a sync replaces it. Endpoints
and source ranges of an unknown service are in no entry, so no comparison can find them. Therefore this module
removes them.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from socket import ntohs

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import FrontendEntry, ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.arrays import Arrays
from ebpfproxy.backends.ebpf.services.record import NOTHING, U32, Range, Record
from ebpfproxy.backends.ebpf.services.slot_lists import places
from ebpfproxy.backends.ebpf.services.slot_ranges import Ids, Ranges
from ebpfproxy.backends.ebpf.services.source_ranges import SourceRanges
from ebpfproxy.model.address import Family, Network, Protocol, family
from ebpfproxy.plan.planned_endpoints import TARGET_SIZE, PlannedEndpoints

_CONTRADICTION = -1
"""The affinity timeout of an entry with inconsistent contents. No plan has it."""

_FAMILIES = {4: Family.IPV4, 6: Family.IPV6}  # by service_name.family
_PROTOCOLS = {int(each): each for each in Protocol}  # Protocol() takes longer


class Reading:
    """Walks over the maps once. The results are `records` and `owner`. It reserves the ids and ranges
    found."""

    def __init__(
        self,
        maps: Maps,
        arrays: Arrays,
        service_ids: Ids,
        sources: SourceRanges,
        clock: Callable[[], float],
    ) -> None:
        self.records: dict[ServicePortKey, Record] = {}
        self.owner: dict[bytes, ServicePortKey] = {}
        self._arrays = arrays
        self._service_ids = service_ids
        self._clock = clock
        arrays.forget_expanded()
        self._ranges = Ranges(arrays.ranges.capacity, arrays.end_grace)
        self._walk(maps, sources)
        self._ranges.inherit(arrays.ranges)
        arrays.ranges = self._ranges

    def _walk(self, maps: Maps, sources: SourceRanges) -> None:
        names = dict(self._read_names(maps))
        frontends: dict[int, dict[bytes, bytes]] = defaultdict(dict)
        for key, value in maps["services"].items():
            frontends[abi.SERVICE.unpack(value)[2]][key] = value
        known = names.keys() | frontends.keys()
        endpoints = self._read_endpoints(known)
        networks = sources.read(known)
        self._service_ids.adopt(set(known))
        for id_ in known:
            key_ = names.get(id_) or _nameless(id_, frontends[id_])
            if key_ in self.records:  # two ids of one name: keep the first, drop the other
                key_ = ServicePortKey(f"?/{id_}", key_.protocol, key_.family)
            self._adopt(
                key_, id_, frontends.get(id_, {}), endpoints.get(id_, []), tuple(networks.get(id_, ()))
            )

    def _read_names(self, maps: Maps) -> Iterable[tuple[int, ServicePortKey]]:
        for key, value in maps["service_names"].items():
            text, protocol, version = abi.SERVICE_NAME.unpack(value)
            name = text.rstrip(b"\0").decode(errors="replace")
            (id_,) = U32.unpack(key)
            try:
                if not 0 < id_ < self._service_ids.capacity:
                    raise ValueError(f"{id_} is not a valid id")
                yield id_, ServicePortKey(name, _PROTOCOLS[protocol], _FAMILIES[version])
            except (KeyError, ValueError):  # another program wrote it: a sync removes everything with this id
                yield id_, ServicePortKey(f"?/{id_}", Protocol.TCP, Family.IPV4)

    def _read_endpoints(self, known: Set[int]) -> dict[int, list[tuple[bytes, int]]]:
        """The rows of the endpoints in force and their ids, by service id.

        Endpoints of an unknown service lose their flags.
        """
        found: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
        taken: set[int] = set()
        for id_, row, service in self._arrays.listed():
            if service in known:
                taken.add(id_)
                found[service].append((row, id_))
            else:
                self._arrays.set_flags(id_, 0)
        self._arrays.endpoint_ids.adopt(taken)
        return found

    def _adopt(
        self,
        key: ServicePortKey,
        id_: int,
        services: dict[bytes, bytes],
        endpoints: list[tuple[bytes, int]],
        networks: tuple[Network, ...],
    ) -> None:
        now = self._clock()
        rows, ids = self._adopt_endpoints(endpoints, now)
        found = PlannedEndpoints.packed(rows)
        record = Record(id_, ServicePortEntry((), found, 0), ids, services=services)
        frontends: list[FrontendEntry] = []
        timeouts: set[int] = set()
        algorithms: set[int] = set()
        slow_starts: set[int] = set()
        seen = {"cluster": False, "local": False}
        agrees = True
        for packed_key, value in services.items():
            self.owner[packed_key] = key
            *ranges, _, timeout, flags, kind, algorithm, slow_start = abi.SERVICE.unpack(value)
            timeouts.add(timeout)
            slow_starts.add(slow_start)
            algorithms.add(algorithm)
            if algorithm and len(algorithms) == 1:
                record.entry = record.entry._replace(algorithm=algorithm)
            scopes = (
                "local" if flags & abi.SERVICE_INTERNAL_LOCAL else "cluster",
                "local" if flags & abi.SERVICE_EXTERNAL_LOCAL else "cluster",
            )
            for scope, packed in zip(scopes, ranges, strict=True):
                agrees &= self._adopt_range(
                    record, scope, abi.SLOT_RANGE.unpack(packed), algorithm, seen, now
                )
            address, port, protocol, _ = abi.SERVICE_KEY.unpack(packed_key)
            frontends.append(FrontendEntry(address, ntohs(port), protocol, kind, flags))
        agrees &= len(timeouts) <= 1 and len(slow_starts) <= 1 and self._lists_are_right(record, seen)
        timeout = max(timeouts, default=0) if agrees else _CONTRADICTION
        record.entry = record.entry._replace(
            frontends=tuple(sorted(frontends)),
            affinity_timeout=timeout,
            source_ranges=networks,
            slow_start=max(slow_starts, default=0),
        )
        self.records[key] = record

    def _adopt_range(
        self, record: Record, scope: str, found: Range, algorithm: int, seen: dict[str, bool], now: float
    ) -> bool:
        """Adopt a frontend's list of a scope; return whether it is the same as that of the previous ones.

        `algorithm`: that of the frontend. The record has the one of its first frontend.
        """
        first, count = found
        has_same_algorithm = algorithm == record.entry.algorithm
        if has_same_algorithm and not seen[scope]:
            seen[scope] = True
            if count and not self._reserve(first, places(count, algorithm)):
                return False
            setattr(record, scope, found if count else NOTHING)
            return True
        if found == getattr(record, scope) or (not count and getattr(record, scope) == NOTHING):
            return has_same_algorithm
        if count and self._reserve(first, places(count, algorithm)):
            # An interrupted update left it, and readers may use it.
            self._ranges.release(first, places(count, algorithm), now, in_force=True)
        return False

    def _reserve(self, first: int, count: int) -> bool:
        """Whether the range exists and was free."""
        return first + count <= self._ranges.capacity and self._ranges.reserve(first, count)

    def _adopt_endpoints(self, endpoints: list[tuple[bytes, int]], now: float) -> tuple[bytes, "array[int]"]:
        """The rows, sorted, and their ids. Of two endpoints with the same target, one is released."""
        in_order = sorted(endpoints)
        if len({row[:TARGET_SIZE] for row, _ in in_order}) < len(in_order):
            in_order = self._without_duplicates(in_order, now)
        return b"".join([row for row, _ in in_order]), array("I", [id_ for _, id_ in in_order])

    def _without_duplicates(self, in_order: list[tuple[bytes, int]], now: float) -> list[tuple[bytes, int]]:
        kept: dict[bytes, tuple[bytes, int]] = {}
        for row, id_ in in_order:
            if kept.setdefault(row[:TARGET_SIZE], (row, id_))[1] != id_:
                self._arrays.set_flags(id_, 0)
                self._arrays.endpoint_ids.release(id_, now, in_force=True)
        return list(kept.values())

    def _lists_are_right(self, record: Record, seen: Mapping[str, bool]) -> bool:
        """Whether both lists contain exactly the endpoints with their flag, in order.

        A list that no frontend refers to is not checked.
        """
        lists = ("cluster", abi.ENDPOINT_CLUSTER, record.cluster), ("local", abi.ENDPOINT_LOCAL, record.local)
        return all(self._is_right(record, flag, range_) for scope, flag, range_ in lists if seen[scope])

    def _is_right(self, record: Record, flag: int, range_: Range) -> bool:
        ids, digest = record.slots(flag)
        if self._arrays.read_slots(range_) != ids:
            return False
        if ids:  # an empty list has no range of its own: its first slot may be that of another
            self._arrays.note_expanded(range_[0], digest)
        return True


def _nameless(id_: int, frontends: Mapping[bytes, bytes]) -> ServicePortKey:
    address, _, protocol, _ = abi.SERVICE_KEY.unpack(next(iter(frontends)))
    try:
        return ServicePortKey(f"?/{id_}", Protocol(protocol), family(address))
    except ValueError:
        return ServicePortKey(f"?/{id_}/{protocol}", Protocol.TCP, family(address))
