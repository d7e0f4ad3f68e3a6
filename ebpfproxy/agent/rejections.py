"""Entries that the kernel rejected, and which of them are retried next."""

from collections.abc import Collection, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from ebpfproxy.errors import KernelError, NotYet
from ebpfproxy.plan.service_plan import PlanKey

K = TypeVar("K")


class _Rejected(NamedTuple):
    """`kind`: of the error, "" if the entry is only postponed. `origin`: a plan that has or had the entry;
    None: that of the node."""

    kind: str
    origin: PlanKey | None


class Rejections(Generic[K]):
    """Retries entries in turns between namespaces, so that those of one do not delay those of another. Of a
    namespace, the one whose retry is longest ago is next. An entry whose work has begun comes first."""

    def __init__(self) -> None:
        self._rejected: dict[K, _Rejected] = {}
        self._waiting: dict[str, dict[K, None]] = {}  # by namespace: its keys, the next one first
        self.final = 0
        """The number of those that are not only postponed."""

    def __len__(self) -> int:
        return len(self._rejected)

    def __contains__(self, key: K) -> bool:
        return key in self._rejected

    def keys(self) -> Collection[K]:
        return self._rejected.keys()

    def kind(self, key: K) -> str | None:
        """Return the kind of the error, "" for a postponed entry, None for one that is not rejected."""
        found = self._rejected.get(key)
        return found.kind if found else None

    def origins(self) -> Iterable[tuple[K, PlanKey | None]]:
        """Return each entry with a plan that has or had it."""
        return ((key, each.origin) for key, each in self._rejected.items())

    def next(self, most: int) -> list[K]:
        """Return up to `most` entries to retry. If several namespaces have some, the next call begins with
        another one."""
        chosen: list[K] = []
        turns = {namespace: iter(keys) for namespace, keys in self._waiting.items()}
        while turns and len(chosen) < most:
            for namespace in list(turns):
                key = next(turns[namespace], None)
                if key is None:
                    del turns[namespace]
                    continue
                chosen.append(key)
                self._waiting[namespace] = self._waiting.pop(namespace)  # to the end
                if len(chosen) == most:
                    break
        return chosen

    def record(
        self,
        tried: Iterable[K],
        rejected: Mapping[K, KernelError],
        origins: Mapping[K, PlanKey | None],
    ) -> None:
        """Replace what is known about the entries `tried`: those that are not `rejected` are in force.

        `origins`: of the entries `rejected` that were not rejected before.
        """
        former = {key: self._rejected[key].origin for key in rejected if key in self._rejected}
        for key in {*tried, *rejected}:
            self._forget(key)
        begun = [key for key, each in rejected.items() if isinstance(each, NotYet) and each.has_begun]
        for key, failure in rejected.items():
            origin = origins[key] if key in origins else former.get(key)
            kind = "" if isinstance(failure, NotYet) else failure.kind
            self._rejected[key] = _Rejected(kind, origin)
            self.final += bool(kind)
            self._waiting.setdefault(_namespace(origin), {})[key] = None
        for key in begun:
            namespace = _namespace(self._rejected[key].origin)
            others = self._waiting[namespace]
            del others[key]
            self._waiting[namespace] = {key: None, **others}

    def _forget(self, key: K) -> None:
        removed = self._rejected.pop(key, None)
        if removed:
            self.final -= bool(removed.kind)
            namespace = _namespace(removed.origin)
            del self._waiting[namespace][key]
            if not self._waiting[namespace]:
                del self._waiting[namespace]


def _namespace(origin: PlanKey | None) -> str:
    """Return the namespace of the plan's Service, "" for that of the node."""
    return origin[0].namespace if origin else ""
