"""The interface of a backend: one kernel mechanism that stores entries by key."""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from ebpfproxy.errors import KernelError
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan

K = TypeVar("K")
E = TypeVar("E")


@dataclasses.dataclass(frozen=True, slots=True)
class Delta(Generic[K, E]):
    """The difference between two sets of entries: entries to put (new or changed) and keys to drop."""

    puts: Mapping[K, E]
    drops: frozenset[K]

    def __bool__(self) -> bool:
        return bool(self.puts or self.drops)


class Backend(Protocol[K, E]):
    """Six methods over keyed entries. All but `render` run on the control thread and raise KernelError.

    - `open` prepares the kernel and takes over the state of the previous run. If that state can continue to
      serve, `open` does not change traffic.
    - `render` converts plans into entries. It is pure, and each entry depends on one plan alone. If several
      plans render the same key, their entries are equal.
    - `read` returns the entries that the kernel actually holds.
    - `apply` writes a delta to the kernel. Puts take effect before drops. It returns what the kernel
      rejected, by key; everything else is in force. If it raises an error instead, the state is unknown and
      the caller must read the kernel back.
    - `generation` returns a value that changes when any program, including this one, changes the backend's
      objects in the kernel. A change by another program since the last `read` also shows after an `apply`, as
      yet another value. It takes a few milliseconds at any size, so it is called every 2 s. If it changed
      although the agent wrote nothing, everything is read and compared. It may change without need, and it
      need not notice counters.
    - `close` closes file descriptors. Traffic continues.
    """

    name: str

    def open(self) -> None: ...

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[K, E]: ...

    def read(self) -> dict[K, E]: ...

    def apply(self, delta: Delta[K, E]) -> Mapping[K, KernelError]: ...

    def generation(self) -> Hashable: ...

    def close(self) -> None: ...
