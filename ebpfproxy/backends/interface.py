"""The interface of a backend: one kernel mechanism that stores entries by key."""

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from ebpfproxy.errors import KernelError
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan

K = TypeVar("K")
E = TypeVar("E")

HOUR = 3600.0
"""The interval of full syncs in kube-proxy, in seconds (proxyutil.FullSyncPeriod, pkg/proxy/util)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delta(Generic[K, E]):
    """The difference between two sets of entries: entries to put (new or changed) and keys to drop."""

    puts: Mapping[K, E]
    drops: frozenset[K]

    def __bool__(self) -> bool:
        return bool(self.puts or self.drops)


class Backend(Protocol[K, E]):
    """Seven methods over keyed entries. All but `render` run on the control thread and raise KernelError.

    - `open` prepares the kernel and takes over the state of the previous run. If that state can continue to
      serve, `open` does not change traffic.
    - `render` converts plans into entries. It is pure, and each entry depends on one plan alone. If several
      plans render the same key, their entries are equal.
    - `read` returns the entries that the kernel actually holds.
    - `check` compares the kernel with `expected`, the entries of the last `read` and all later changes, which
      is a live view. It yields after each step of at most a few milliseconds whether it found no difference.
      `apply` may be called between the steps; a `read` ends the check. It may leave out what `generation`
      notices.
    - `reread_seconds`: after this time, everything must be read although `check` found no difference. 0:
      instead of each check.
    - `apply` writes a delta to the kernel. Puts take effect before drops. It returns what the kernel
      rejected, by key; everything else is in force. Of a rejected put, a part may be in force. If it raises
      an error instead, the state is unknown and the caller must read the kernel back.
    - `generation` returns a value that changes when any program, including this one, changes the backend's
      objects in the kernel. A change by another program since the last `read` also shows after an `apply`, as
      yet another value. It takes a few milliseconds at any size, so it is called every 2 s. If it changed
      although the agent wrote nothing, everything is read and compared. It may change without need, and it
      need not notice counters.
    - `close` closes file descriptors, also those of an `open` that failed. Traffic continues.
    """

    name: str
    reread_seconds: float

    def open(self) -> None: ...

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[K, E]: ...

    def read(self) -> dict[K, E]: ...

    def check(self, expected: Mapping[K, E]) -> Iterator[bool]: ...

    def apply(self, delta: Delta[K, E]) -> Mapping[K, KernelError]: ...

    def generation(self) -> Hashable: ...

    def close(self) -> None: ...
