"""Keeps one backend in step: render, diff, apply, remember."""

from collections.abc import Collection, Hashable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.interface import Backend, Delta
from ebpfproxy.errors import KernelError
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.claims import Claims
from ebpfproxy.plan.counts import ClusterSize, no_local_endpoints
from ebpfproxy.plan.devices import needs_packets_of_pods
from ebpfproxy.plan.endpoints import API_SERVER, keep_last_endpoints
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.health_check_node_port import HealthCheck, plan_health_check
from ebpfproxy.plan.local_traffic import families_without_detector
from ebpfproxy.plan.node_plan import plan_node
from ebpfproxy.plan.service_plan import NodePlan, PlanContext, PlanKey, ServicePortPlan

K = TypeVar("K")
E = TypeVar("E")

log = Logger(__name__)

NO_LOCAL_DETECTION = "Cannot detect local traffic"
"""`reason` is what is missing; masquerading treats every client as one outside."""
LOCAL_DETECTION = "Detecting local traffic"
"""What was missing is known now."""
FRONTEND_CONFLICT = "Services claim the same frontend"
"""`served` has the address and port."""
REPAIRED = "Repaired drift"
"""Another program changed what the agent has in the kernel; `first` is one of `entries`."""
NOT_SERVED = "Kernel rejected an entry, its ServicePort is not up to date"
"""Usually a map is full; `hint` names the flag."""


class SyncResult(NamedTuple):
    """What a sync did: entries put, dropped, and rejected, be it to be put or to be dropped; `drifted` of
    them only because the kernel had come to differ from what we had written there."""

    put: int
    dropped: int
    rejected: int
    drifted: int


class Reconciler(Generic[K, E]):
    """Desired entries are kept apart from those known to be in the kernel.

    A change is in `desired` at once and for good, so that nothing is lost when a sync fails: the next one
    reads the kernel back and compares everything.
    """

    def __init__(self, backend: Backend[K, E], context: PlanContext) -> None:
        self._backend = backend
        self._context = context
        self._claims = Claims()
        self._size = ClusterSize()
        self._figures: dict[PlanKey, tuple[int, int, int, bool]] = {}
        self._keys: dict[PlanKey | None, frozenset[K]] = {}  # None: the entries of the node
        self._desired: dict[K, E] = {}
        self._shared: dict[K, int] = {}  # of entries that several plans have: how many beside the first
        self.node_plan: NodePlan | None = None
        self._undetected: frozenset[Family] = frozenset()
        self._pods = False  # whether the plan of the node has what the packets of pods need
        self._actual: dict[K, E] | None = None  # None: not known, so read it
        self._generation: Hashable = None  # of the kernel, when that was known
        self._touched: set[K] = set()
        self._reported: dict[K, str] = {}
        self._changed: dict[PlanKey, ServicePortPlan | None] = {}
        self._left_over: set[K] = set()
        self._begun = False  # whether a sync has succeeded
        self.endpoints = 0
        self.no_local_internal = 0
        self.no_local_external = 0
        self.needing_pods = 0
        """How many ServicePorts need the packets of pods."""
        self.health_checks: dict[NamespacedName, HealthCheck] = {}
        """The answers to load balancers' health checks, by Service."""

    @property
    def services(self) -> int:
        """How many ServicePorts, by family, are desired."""
        return len(self._claims.plans)

    @property
    def conflicts(self) -> int:
        """How many frontends more than one ServicePort claims."""
        return self._claims.conflicts

    def plan(
        self,
        state: ClusterState,
        services: frozenset[NamespacedName],
        *,
        node_changed: bool,
        host_changed: bool,
    ) -> None:
        """Take in what changed: these Services, the Node and so all of them, what the kernel reports."""
        names = services | state.services.keys() if node_changed else services
        for name in names:
            self._size.update(name, state.services.get(name), state.slices_of(name).values())
        large = self._size.large
        for name in names:
            self._plan_service(name, state, large)
        pods = self.needing_pods > 0
        if node_changed or host_changed or pods is not self._pods or self.node_plan is None:
            self._pods = pods
            self._plan_node(state)

    def _plan_node(self, state: ClusterState) -> None:
        self._report_undetected(families_without_detector(self._context, state.node))
        plan = plan_node(state, self._context, self._pods, self.node_plan)
        if plan != self.node_plan:  # a device may change in ways that mean nothing here
            self._desire(None, self._backend.render((), plan))
            self.node_plan = plan

    def _report_undetected(self, families: frozenset[Family]) -> None:
        if families - self._undetected:
            log.warning(
                NO_LOCAL_DETECTION,
                families=", ".join(of.value for of in Family if of in families),
                detect_local_mode=self._context.detect_local.value,
                hint="that needs podCIDRs of our Node, --cluster-cidr, or the name of a device",
            )
        elif self._undetected and not families:
            log.info(LOCAL_DETECTION)
        self._undetected = families

    def _plan_service(self, name: NamespacedName, state: ClusterState, large: Collection[Family]) -> None:
        service = state.services.get(name)
        plans: tuple[ServicePortPlan, ...] = ()
        check = None
        if service is not None:
            slices = state.slices_of(name).values()
            plans = plan_service(service, slices, state.node, self._context, large)
            check = plan_health_check(service, slices, self._context.node_name) if plans else None
        if check:
            self.health_checks[name] = check
        else:
            self.health_checks.pop(name, None)
        if name == API_SERVER:
            plans = keep_last_endpoints(plans, self._claims.plans.get)
        settlement = self._claims.update(name, plans)
        for lost in settlement.lost:
            log.warning(
                FRONTEND_CONFLICT,
                frontend=lost.frontend,
                served=str(lost.winner),
                rejected=str(lost.loser),
            )
        for plan in settlement.plans:
            self._desire(plan.key, self._backend.render((plan,), None))
            self._count(plan.key, plan)
            self._changed[plan.key] = plan
        for key in settlement.removed:
            self._desire(key, {})
            self._count(key, None)
            self._changed[key] = None

    def _desire(self, origin: PlanKey | None, entries: Mapping[K, E]) -> None:
        keys = frozenset(entries)
        previous = self._keys.get(origin, frozenset())
        for key in previous - keys:
            self._disown(key)
        for key in keys - previous:
            if key in self._desired:
                self._shared[key] = self._shared.get(key, 0) + 1
        self._desired.update(entries)
        self._touched |= keys | previous
        if keys:
            self._keys[origin] = keys
        else:
            self._keys.pop(origin, None)

    def _disown(self, key: K) -> None:
        """One plan less has this entry."""
        others = self._shared.pop(key, 0)
        if not others:
            del self._desired[key]
        elif others > 1:
            self._shared[key] = others - 1

    def _count(self, key: PlanKey, plan: ServicePortPlan | None) -> None:
        """Keep up the sums that metrics show."""
        previous = self._figures.pop(key, None)
        figures = None
        if plan:
            without = no_local_endpoints((plan,))
            figures = self._figures[key] = (len(plan.endpoints), *without, needs_packets_of_pods(plan))
        for sign, some in ((-1, previous), (1, figures)):
            if some:
                endpoints, internal, external, needing = some
                self.endpoints += sign * endpoints
                self.no_local_internal += sign * internal
                self.no_local_external += sign * external
                self.needing_pods += sign * needing

    def take_changed(self) -> Mapping[PlanKey, ServicePortPlan | None]:
        """The plans that are others than when this was asked last, None for those that are gone."""
        changed, self._changed = self._changed, {}
        return changed

    def take_left_over(self) -> frozenset[K]:
        """What an earlier run had left in the kernel that no plan wants, until the first sync that succeeded;
        afterwards, and when this is asked again, nothing."""
        left, self._left_over = self._left_over, set()
        return frozenset(left)

    def rejected(self) -> frozenset[PlanKey]:
        """The plans of which the last sync that succeeded was rejected something."""
        if not self._reported:
            return frozenset()
        reported = frozenset(self._reported)
        return frozenset(origin for origin, keys in self._keys.items() if origin and keys & reported)

    def holds(self, keys: Collection[K]) -> bool:
        """Whether the kernel has the entries of all these keys as they are desired, by the last sync that
        succeeded; False where there was none."""
        actual = self._actual or {}
        return all(key in actual and actual[key] == self._desired.get(key) for key in keys)

    def is_disturbed(self) -> bool:
        """Whether another program has changed what is in the kernel since the last sync that succeeded.

        False where there was none. Raises KernelError.
        """
        return self._actual is not None and self._backend.generation() != self._generation

    def sync(self, verify: bool) -> SyncResult:
        """Bring the kernel in step; with `verify`, or after a failure, compare everything.

        Raises KernelError; the next call then does it all again.
        """
        expected = self._actual
        try:
            if verify or self._actual is None:
                self._actual = None
                actual = self._backend.read()
                delta = diff(actual, self._desired)
            else:
                actual = self._actual
                delta = self._with_rejected(diff(actual, self._desired, self._touched))
            drifted = self._drifted(expected, actual) if verify and expected is not None else 0
            if not self._begun:
                self._left_over |= delta.drops
            # Also where nothing differs: after a restart the backend lets go of what was there before.
            applies = verify or bool(delta)
            rejected = self._backend.apply(delta) if applies else {}
        except KernelError:
            self._actual = None
            raise
        for key, entry in delta.puts.items():
            if key not in rejected:
                actual[key] = entry
        dropped = delta.drops - rejected.keys()
        for key in dropped:
            actual.pop(key, None)
        self._actual, self._begun = actual, True
        if applies:  # else what others did meanwhile would be taken for known
            self._generation = self._backend.generation()
        self._touched = set(rejected)
        self._report(rejected)
        return SyncResult(len(delta.puts.keys() - rejected.keys()), len(dropped), len(rejected), drifted)

    def _with_rejected(self, delta: Delta[K, E]) -> Delta[K, E]:
        """What was rejected is put again even where it looks as desired: it kept what it had, but for
        frontends that another took over."""
        again = {key: self._desired[key] for key in self._reported if key in self._desired}
        return Delta({**delta.puts, **again}, delta.drops)

    @staticmethod
    def _drifted(expected: Mapping[K, E], actual: Mapping[K, E]) -> int:
        difference = diff(actual, expected)
        if difference:
            keys: Any = sorted({str(key) for key in (*difference.puts, *difference.drops)})
            log.warning(REPAIRED, entries=len(keys), first=keys[0])
        return len(difference.puts) + len(difference.drops)

    def _report(self, rejected: Mapping[K, KernelError]) -> None:
        """Each rejection once, until it is over."""
        for key, failure in rejected.items():
            if self._reported.get(key) != failure.message:
                log.warning(NOT_SERVED, reason=failure.message, hint=failure.hint)
        self._reported = {key: failure.message for key, failure in rejected.items()}
