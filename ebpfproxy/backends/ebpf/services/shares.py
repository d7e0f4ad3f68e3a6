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


def by_namespace(records: Mapping[ServicePortKey, Record]) -> defaultdict[str, Counter[str]]:
    """Return the entries in use, by namespace and map."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for key, record in records.items():
        found[namespace_of(key)].update(use_of(record))
    return found


def is_within(used: int, fresh: int, free: int) -> bool:
    """Return whether a namespace that uses `used` entries may use `fresh` more of the `free` ones."""
    return used + fresh <= FACTOR * (free - fresh)
