"""What a backend is: one kernel mechanism that holds entries by key."""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from ebpfproxy.errors import KernelError
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan

K = TypeVar("K")
E = TypeVar("E")


@dataclasses.dataclass(frozen=True, slots=True)
class Delta(Generic[K, E]):
    """What leads from one set of entries to another: entries to put (new or changed), keys to drop."""

    puts: Mapping[K, E]
    drops: frozenset[K]

    def __bool__(self) -> bool:
        return bool(self.puts or self.drops)


class Backend(Protocol[K, E]):
    """Six methods over keyed entries. All but `render` raise KernelError, and run on the control thread.

    - `open` makes the kernel ready and takes over what an earlier run left; it changes no traffic yet
      where that run's state can continue serving.
    - `render` turns plans into entries; pure, and each entry depends on one plan alone. Several
      plans may have an entry in common, which then is equal in all.
    - `read` returns what the kernel really holds, in the same entries.
    - `apply` brings a delta into the kernel. Puts come into force before drops do. It returns what
      the kernel rejected, by key; all the rest is in force. An error raised instead means that
      nothing is known: the caller reads the kernel back.
    - `generation` is a value that changes when any program, this one included, changes in the kernel what
      this backend keeps there. What another program changed since the last `read` shows after an `apply`,
      too, by yet another value. It costs a few milliseconds at any size, so it is asked every other second;
      where it changed although we wrote nothing, everything is read and compared. It may change without need,
      and need not notice a counter.
    - `close` lets go of file descriptors; traffic continues.
    """

    name: str

    def open(self) -> None: ...

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[K, E]: ...

    def read(self) -> dict[K, E]: ...

    def apply(self, delta: Delta[K, E]) -> Mapping[K, KernelError]: ...

    def generation(self) -> Hashable: ...

    def close(self) -> None: ...
