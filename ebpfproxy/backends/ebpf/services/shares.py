"""How much of a map the Services of one namespace may use, so that those of others find room.

A namespace may use up to four times what stays free. One namespace alone can use four fifths of a map, two
can use four ninths each. However many they are, room is left for one more (the dynamic thresholds of shared
switch buffers: Choudhury and Hahne, 1998).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from ebpfproxy.backends.ebpf.entries import ServicePortKey
from ebpfproxy.backends.ebpf.services.record import NOTHING, Record
from ebpfproxy.backends.ebpf.services.slot_ranges import Ranges

FACTOR = 4


def namespace_of(key: ServicePortKey) -> str:
    """Return the namespace of a ServicePort."""
    return key.name.partition("/")[0]


def in_turns(keys: Iterable[ServicePortKey]) -> list[ServicePortKey]:
    """Return one key of each namespace, then the next one of each."""
    seen: Counter[str] = Counter()
    turns: dict[ServicePortKey, int] = {}
    for key in keys:
        namespace = namespace_of(key)
        turns[key] = seen[namespace]
        seen[namespace] += 1
    return sorted(turns, key=turns.__getitem__)


def use_of(record: Record) -> dict[str, int]:
    """Return the entries that a ServicePort uses, by map."""
    ranges = (each for each in (record.cluster, record.local) if each != NOTHING)
    return {
        "services": len(record.services),
        "endpoints": len(record.ids),
        "slots": sum(1 << Ranges.order_of(record.places(each)) for each in ranges),
        "source_ranges": len(record.entry.source_ranges),
    }


class Uses:
    """The entries in use, by namespace and map."""

    def __init__(self, records: Mapping[ServicePortKey, Record]) -> None:
        self._uses: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for key, record in records.items():
            self.replace(key, None, record)

    def of(self, namespace: str, map_: str) -> int:
        """Return how many entries of a map the namespace uses."""
        return self._uses[namespace][map_]

    def replace(self, key: ServicePortKey, old: Record | None, new: Record | None) -> None:
        """Count the new record of a ServicePort instead of the old one."""
        of = self._uses[namespace_of(key)]
        if new:
            of.update(use_of(new))
        if old:
            of.subtract(use_of(old))


def is_within(used: int, fresh: int, free: int) -> bool:
    """Return whether a namespace that uses `used` entries may use `fresh` more of the `free` ones."""
    return used + fresh <= FACTOR * (free - fresh)
