"""A backend in memory for tests of the code above backends. It keeps the invariants of the kernel.

A frontend belongs to one ServicePort at a time, room is limited, devices may appear and disappear, an error
may occur in the middle of a delta, and entries are kept after the end of the process. The contract tests run
the same cases with this backend and the real ones.
"""

import dataclasses
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.generation import Generation
from ebpfproxy.backends.interface import Backend
from ebpfproxy.errors import KernelError, TableFull
from ebpfproxy.model.address import Network
from ebpfproxy.plan.service_plan import (
    DevicePlan,
    Frontend,
    FrontendPlan,
    NodePlan,
    PlanKey,
    ServicePortPlan,
)
from tests.support.build import CONTEXT


class DeviceId(NamedTuple):
    """A network device with its current name."""

    ifindex: int
    name: str


Key = PlanKey | Network | DeviceId
Entry = ServicePortPlan | bool | DevicePlan
"""The plan of a ServicePort or device; for a local network, whether NodePorts answer at its addresses."""

Write = tuple[Literal["put", "trim", "drop"], Key]
"""`trim`: frontends that the put entry no longer has are removed."""


@dataclasses.dataclass(slots=True)
class FakeKernel:
    """The state that outlasts a backend. `capacity`: the number of frontends that fit; None: unlimited.

    `ports` has the plans without their frontends, which are in `frontends`, each with its owner. `devices`
    has the existing devices by ifindex, and `watched` the plans of the managed ones; code that removes a
    device from `devices` must also remove it from `watched`. A test may change all of it, as a foreign writer
    would. `writes` has all writes in order.
    """

    capacity: int | None = None
    ports: dict[PlanKey, ServicePortPlan] = dataclasses.field(default_factory=dict)
    frontends: dict[Frontend, tuple[PlanKey, FrontendPlan]] = dataclasses.field(default_factory=dict)
    networks: dict[Network, bool] = dataclasses.field(default_factory=dict)
    devices: dict[int, str] = dataclasses.field(default_factory=dict)
    watched: dict[int, DevicePlan] = dataclasses.field(default_factory=dict)
    writes: list[Write] = dataclasses.field(default_factory=list)


class FakeBackend(Backend[Key, Entry]):
    """Two of them with one kernel represent two runs of the agent."""

    name = "fake"
    reread_seconds = math.inf

    def __init__(self, kernel: FakeKernel | None = None) -> None:
        self.context = CONTEXT
        self.kernel = kernel or FakeKernel()
        self.failure: KernelError | None = None
        """See `lacking`."""
        self.differing: Collection[PlanKey] = ()
        """The plans that it would render differently now."""
        self._generation = Generation(lambda: repr(dataclasses.replace(self.kernel, writes=[])))
        self._opened = False
        self._read_failure: KernelError | None = None
        self._check_failure: KernelError | None = None
        self._apply_failure: tuple[int, KernelError | None] = 0, None

    def fail_next_read(self, failure: KernelError) -> None:
        """The next `read` raises it."""
        self._read_failure = failure

    def fail_next_check(self, failure: KernelError) -> None:
        """The next `check` raises it."""
        self._check_failure = failure

    def fail_next_apply(self, failure: KernelError | None, after: int = 0) -> None:
        """The next `apply` raises it before its write number `after`, or at its end if there are fewer
        writes.

        None: it does not fail.
        """
        self._apply_failure = after, failure

    def open(self) -> None:
        self._opened = True

    def close(self) -> None:
        self._opened = False

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        entries: dict[Key, Entry] = {plan.key: _sorted(plan) for plan in plans}
        if node is not None:
            for network in node.local_networks | node.node_port_networks:
                entries[network] = network in node.node_port_networks
            entries.update({DeviceId(each.ifindex, each.name): each for each in node.devices})
        return entries

    def lacking(self) -> KernelError | None:
        return self.failure

    def outdated(self, plans: Collection[PlanKey]) -> Collection[PlanKey]:
        return set(self.differing).intersection(plans)

    def generation(self) -> Hashable:
        return self._generation.value()

    def read(self) -> dict[Key, Entry]:
        """Inconsistent state is read as an entry that no plan renders."""
        self._check_open()
        failure, self._read_failure = self._read_failure, None
        if failure:
            raise failure
        self._generation.reading()
        return self._held()

    def _held(self) -> dict[Key, Entry]:
        own: dict[PlanKey, list[FrontendPlan]] = {key: [] for key in self.kernel.ports}
        stray: set[PlanKey] = set()
        for key, plan in self.kernel.frontends.values():
            if key in own:
                own[key].append(plan)
            else:
                stray.add(key)
        found: dict[Key, Entry] = dict(self.kernel.networks.items())
        for ifindex, device in self.kernel.watched.items():
            name = self.kernel.devices[ifindex]
            found[DeviceId(ifindex, name)] = device._replace(name=name)
        for key, port in self.kernel.ports.items():
            found[key] = _sorted(dataclasses.replace(port, frontends=tuple(own[key])))
        return found | dict.fromkeys(stray, False)

    def check(self, expected: Mapping[Key, Entry]) -> Iterator[bool]:
        """One step that compares everything."""
        self._check_open()
        failure, self._check_failure = self._check_failure, None
        if failure:
            raise failure
        yield self._held() == dict(expected)

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """Apply all puts, then remove their superfluous frontends, then apply the drops: room is freed
        last."""
        self._check_open()
        with self._generation.own_change():
            return self._apply(delta)

    def _apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        budget, failure = self._apply_failure
        self._apply_failure = 0, None
        rejected: dict[Key, KernelError] = {}
        order: list[Write] = [("put", key) for key in delta.puts]
        order += [("trim", key) for key in delta.puts] + [("drop", key) for key in delta.drops]
        for done, (kind, key) in enumerate(order):
            if failure and done == budget:
                raise failure
            if kind == "put":
                try:
                    self._put(key, delta.puts[key])
                except TableFull as full:
                    rejected[key] = full
                    continue
            elif kind == "drop":
                self._drop(key)
            elif key not in rejected:
                self._trim(key, delta.puts[key])
            self.kernel.writes.append((kind, key))
        if failure:
            raise failure
        return rejected

    def _put(self, key: Key, entry: Entry) -> None:
        kernel = self.kernel
        if isinstance(key, Network):
            kernel.networks[key] = bool(entry)
            return
        if isinstance(key, DeviceId):
            assert isinstance(entry, DevicePlan)
            if key.ifindex in kernel.devices:  # otherwise the next plan removes it
                kernel.watched[key.ifindex] = entry
            return
        assert isinstance(entry, ServicePortPlan)
        fresh = sum(each.frontend not in kernel.frontends for each in entry.frontends)
        needed = len(kernel.frontends) + fresh
        if kernel.capacity is not None and fresh and needed > kernel.capacity:
            raise TableFull(f"{key[0]}: room for {kernel.capacity} frontends, {needed} are needed")
        kernel.ports[key] = dataclasses.replace(entry, frontends=())
        kernel.frontends |= {each.frontend: (key, each) for each in entry.frontends}

    def _trim(self, key: Key, entry: Entry) -> None:
        if isinstance(entry, ServicePortPlan) and not isinstance(key, Network | DeviceId):
            self._drop_frontends(key, keep={each.frontend for each in entry.frontends})

    def _drop(self, key: Key) -> None:
        if isinstance(key, Network):
            self.kernel.networks.pop(key, None)
        elif isinstance(key, DeviceId):
            if key.ifindex in self.kernel.watched and self.kernel.watched[key.ifindex].name == key.name:
                del self.kernel.watched[key.ifindex]
        else:
            self.kernel.ports.pop(key, None)
            self._drop_frontends(key, keep=set())

    def _drop_frontends(self, of: PlanKey, keep: set[Frontend]) -> None:
        """Drop only frontends that `of` owns: another Service may have taken over some."""
        for frontend, (owner, _) in list(self.kernel.frontends.items()):
            if owner == of and frontend not in keep:
                del self.kernel.frontends[frontend]

    def _check_open(self) -> None:
        if not self._opened:
            raise KernelError("the backend is not open")


def _sorted(plan: ServicePortPlan) -> ServicePortPlan:
    """The plan with sorted frontends: their order is irrelevant, and the kernel does not keep it."""
    frontends = sorted(plan.frontends, key=lambda each: each.frontend)
    return dataclasses.replace(plan, frontends=tuple(frontends))
