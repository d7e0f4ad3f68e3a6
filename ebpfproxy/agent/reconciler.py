"""The reconciler of one backend: it plans, renders, compares with the kernel, and applies the difference."""

import math
import sys
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from ebpfproxy.agent.edge_view import EdgeView
from ebpfproxy.agent.foreign_host_ips import ForeignHostIps
from ebpfproxy.agent.ignored_balancing import IgnoredBalancing
from ebpfproxy.agent.parts import Parts
from ebpfproxy.agent.protected_claims import ProtectedClaims
from ebpfproxy.agent.rejections import Rejections
from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.interface import Backend
from ebpfproxy.errors import KernelError, NotYet
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.service import NamespacedName, ServicePortName
from ebpfproxy.plan.balancing import EVERYTHING, Support
from ebpfproxy.plan.claims import Claims
from ebpfproxy.plan.counts import ClusterSize, NoLocalEndpoints, no_local_endpoints
from ebpfproxy.plan.devices import needs_packets_of_node, needs_packets_of_pods
from ebpfproxy.plan.endpoints import API_SERVER, keep_last_endpoints
from ebpfproxy.plan.frontends import is_unserved, plan_name
from ebpfproxy.plan.health_check_node_port import HealthCheck, plan_health_check
from ebpfproxy.plan.host_ports import has_host_address
from ebpfproxy.plan.local_traffic import families_without_detector
from ebpfproxy.plan.node_plan import plan_node
from ebpfproxy.plan.on_link import FrontendAddresses
from ebpfproxy.plan.service_plan import NodePlan, PlanContext, PlanKey, Role, ServicePortPlan

K = TypeVar("K")
E = TypeVar("E")

log = Logger(__name__)

NO_LOCAL_DETECTION = "Cannot detect local traffic"
"""Pods cannot be distinguished from other clients in `families`, which affects masquerading."""
LOCAL_DETECTION = "Detecting local traffic"
"""Local traffic can be detected again in all families."""
FRONTEND_CONFLICT = "Services claim the same frontend"
"""The frontend is served for `served`, and not for `rejected`."""
REPAIRED = "Repaired drift"
"""Another program had changed `entries` entries in the kernel; `first` is the first of their keys."""
UNSERVED = "Kernel cannot serve the protocol of a ServicePort in this mode"
"""Its traffic is not translated. Logged once for each ServicePort, and counted as a rejected entry."""
NOT_SERVED = "Kernel rejected an entry, its ServicePort is not up to date"
"""Usually a map is full, or the share of a namespace is used up. `reason` names the ServicePort, `hint` the
flag that sets the size of the map. What the ServicePort no longer has is removed in any case."""


class SyncResult(NamedTuple):
    """The number of entries that a sync put, dropped, and found drifted, and that the kernel rejected.

    `rejected` counts rejected puts and drops, without postponed ones, and ServicePorts that the kernel cannot
    serve. `remaining`: a further sync may apply what was postponed or not retried. `drifted` counts
    the entries that differed from what the agent had written.
    """

    put: int
    dropped: int
    rejected: int
    drifted: int
    remaining: bool = False


class Reconciler(Generic[K, E]):
    """Keeps desired entries and the entries in the kernel separately, and syncs the latter to the former.

    A change is in the desired entries before it is applied. So a failed sync loses nothing: the next sync
    reads the kernel back and compares everything.
    """

    def __init__(self, backend: Backend[K, E], context: PlanContext, balancing: Support = EVERYTHING) -> None:
        """`balancing`: what the mode honors; the rest is reported."""
        self._backend = backend
        self._context = context
        self._ignored_balancing = IgnoredBalancing(balancing, context)
        self._foreign_host_ips = ForeignHostIps(context)
        self._protected_claims = ProtectedClaims(context)
        self._claims = Claims()
        self._parts = Parts()
        self._size = ClusterSize()
        self._keys: dict[PlanKey | None, tuple[K, ...]] = {}  # None: the entries of the node
        self._desired: dict[K, E] = {}
        self._shared: dict[K, int] = {}  # by key: how many plans besides the first have the entry
        self.node_plan: NodePlan | None = None
        self._undetected: frozenset[Family] = frozenset()
        self._needed = False, False  # whether `node_plan` includes the devices of pods, and loopback
        self._addresses = FrontendAddresses()
        self._on_link: frozenset[Address] = frozenset()  # those that `node_plan` includes
        self._actual: dict[K, E] | None = None  # None: unknown, so the next sync reads it
        self._generation: Hashable = None  # `Backend.generation` at the time of `_actual`
        self._touched: dict[K, PlanKey | None] = {}  # with the plan that has or had the entry
        self._rejections = Rejections[K]()
        self._untried = 0  # how many of these were not retried since the last change
        self._changed: dict[PlanKey, ServicePortPlan | None] = {}
        self._leftovers: set[K] = set()
        self._has_synced = False  # whether a sync has succeeded
        self.endpoints = 0
        self._no_local = {family: [0, 0] for family in Family}  # internal, external
        self.needing_pods = 0
        """The number of ServicePorts that need the packets of pods (`needs_packets_of_pods`)."""
        self._unserved: dict[NamespacedName, frozenset[ServicePortName]] = {}
        self._direct: set[NamespacedName] = set()  # the Services that request direct server return
        self._needing_node = 0  # as `needing_pods`, by `needs_packets_of_node`
        self.health_checks: dict[NamespacedName, HealthCheck] = {}
        """The health checks of load balancers, by Service. They change when the next sync applies the last
        changed plan of the namespace."""
        self._health_checks_due: dict[NamespacedName, HealthCheck | None] = {}
        self.health_version = 0
        """Increases with each change of `health_checks`."""
        self.edge = EdgeView() if context.role is Role.EDGE else None
        """What the plans of an edge mean outside the kernel; None for a node."""

    @property
    def services(self) -> int:
        """The number of desired plans: each ServicePort counts once per family."""
        return len(self._claims.plans)

    @property
    def desired(self) -> Mapping[K, E]:
        """The desired entries of all plans and of the node. A live view."""
        return self._desired

    @property
    def plans(self) -> Mapping[PlanKey, ServicePortPlan]:
        """The desired plans. A live view."""
        return self._claims.plans

    @property
    def no_local(self) -> dict[Family, NoLocalEndpoints]:
        """The ServicePorts without local endpoints (`no_local_endpoints`), by family."""
        return {family: NoLocalEndpoints(*counts) for family, counts in self._no_local.items()}

    @property
    def conflicts(self) -> int:
        """The number of frontends that more than one ServicePort claims."""
        return self._claims.conflicts

    @property
    def protected_claims(self) -> ProtectedClaims:
        """The frontends that must not be served."""
        return self._protected_claims

    def plan(
        self,
        state: ClusterState,
        services: frozenset[NamespacedName],
        *,
        node_changed: bool,
        host_changed: bool,
        peers_changed: bool = False,
        most: float = math.inf,
    ) -> None:
        """Plan what changed, and render it, with `most` only a part (`render`).

        `services` have changed. `node_changed`: the Node has changed, so all Services are planned again.
        `host_changed`: local addresses, devices or listening sockets have changed, so the node and host ports
        with hostIP are planned again.
        `peers_changed`: other Nodes have changed, so the Services with direct server return and the node are
        planned again.
        """
        names: Collection[NamespacedName] = services | self._direct if peers_changed else services
        if host_changed:
            names = {*names, *(name for name, pod in state.pods.items() if has_host_address(pod))}
        outdated = self._protected_claims.outdated(state)
        if outdated:
            names = {*names, *outdated}
        if node_changed:  # in the order of their objects in memory, which is faster than that of a set
            names = dict.fromkeys((*state.services, *state.pods, *services))
        for name in names:
            self._size.update(name, state.services.get(name), state.slices_of(name))
        large = self._size.large
        for name in names:
            self._plan_service(name, state, large)
            if math.isinf(most):
                self.render()  # at once: what a plan needs to be rendered is not kept for all of them
        needed = self.needing_pods > 0, self._needing_node > 0
        on_link = self._addresses.on_link(state.devices)
        needs_other = needed != self._needed or on_link != self._on_link
        if node_changed or host_changed or peers_changed or needs_other or self.node_plan is None:
            self._needed, self._on_link = needed, on_link
            self._plan_node(state)
        self.render(most)

    def _plan_node(self, state: ClusterState) -> None:
        self._report_undetected(families_without_detector(self._context, state.node))
        pods, of_node = self._needed
        plan = plan_node(state, self._context, pods, self.node_plan, of_node, self._on_link)
        if plan != self.node_plan:  # not every change of a device changes the plan
            self._desire(None, self._backend.render((), plan))
            self.node_plan = plan

    def _report_undetected(self, families: frozenset[Family]) -> None:
        if families - self._undetected:
            log.warning(
                NO_LOCAL_DETECTION,
                families=", ".join(each.value for each in Family if each in families),
                detect_local_mode=self._context.detect_local.value,
                hint="set podCIDRs of the Node, --cluster-cidr or a device, as --detect-local-mode needs",
            )
        elif self._undetected and not families:
            log.info(LOCAL_DETECTION)
        self._undetected = families

    def _plan_service(self, name: NamespacedName, state: ClusterState, large: Collection[Family]) -> None:
        service = state.services.get(name)
        self._foreign_host_ips.update(name, state)
        planned = plan_name(name, state, self._context, large)
        plans = self._served(name, self._protected_claims.without_protected(name, planned, state))
        check = None
        if self.edge:
            self.edge.update(name, service if plans else None, state.slices_of(name))
        elif service and plans:
            check = plan_health_check(service, state.slices_of(name), self._context.node_name)
        self._health_checks_due[name] = check
        if name == API_SERVER:
            plans = keep_last_endpoints(plans, self._claims.plans.get)
        if any(each.balancing.dsr for each in plans):
            self._direct.add(name)
        else:
            self._direct.discard(name)
        self._ignored_balancing.update(name, plans)
        update = self._claims.update(name, plans)
        for lost in update.lost:
            log.warning(
                FRONTEND_CONFLICT,
                frontend=lost.frontend,
                served=str(lost.winner),
                rejected=str(lost.loser),
            )
        self._parts.add(update)
        for plan in update.plans:
            self._count(plan, 1)
        for plan in update.previous:
            self._count(plan, -1)

    def render(self, most: float = math.inf) -> None:
        """Render changed plans. With `most`, only some, whose sizes add up to it (`Parts.take`)."""
        for key, plan in self._parts.take(most).items():
            self._desire(key, self._backend.render((plan,), None) if plan else {})
            self._changed[key] = plan
            if self.edge:
                self.edge.replace(key, plan)
        for name in [each for each in self._health_checks_due if each.namespace not in self.unrendered]:
            self._replace_health_check(name, self._health_checks_due.pop(name))

    def _replace_health_check(self, name: NamespacedName, check: HealthCheck | None) -> None:
        self.health_version += check != self.health_checks.get(name)
        if check:
            self.health_checks[name] = check
        else:
            self.health_checks.pop(name, None)

    @property
    def unrendered(self) -> Collection[str]:
        """The namespaces that have changed plans which are not rendered yet."""
        return self._parts.namespaces

    def render_again(self, keys: Iterable[PlanKey]) -> None:
        """Render these plans again: what their entries depend on besides has changed."""
        for key in keys:
            self._desire(key, self._backend.render((self._claims.plans[key],), None))

    def _served(
        self, name: NamespacedName, plans: tuple[ServicePortPlan, ...]
    ) -> tuple[ServicePortPlan, ...]:
        """Return the plans without those that the kernel cannot serve, which are reported."""
        reason = self._context.sctp_unserved
        if not reason:
            return plans
        without = frozenset(each.name for each in plans if is_unserved(each, self._context))
        for each in sorted(without - self._unserved.get(name, frozenset())):
            log.warning(UNSERVED, service=str(each), reason=reason, hint="use another --proxy-mode")
        if without:
            self._unserved[name] = without
        else:
            self._unserved.pop(name, None)
        return tuple(each for each in plans if each.name not in without)

    def _desire(self, origin: PlanKey | None, entries: Mapping[K, E]) -> None:
        """Replace the desired entries of a plan; `origin` is None for the plan of the node."""
        previous = self._keys.get(origin, ())
        if len(previous) != len(entries) or not all(key in entries for key in previous):
            self._replace_keys(origin, previous, entries)
        self._desired.update(entries)
        self._touched.update(dict.fromkeys((*previous, *entries), origin))

    def _replace_keys(self, origin: PlanKey | None, previous: tuple[K, ...], keys: Collection[K]) -> None:
        for key in previous:
            if key not in keys:
                self._drop_reference(key)
        for key in frozenset(keys).difference(previous):
            if key in self._desired:
                self._shared[key] = self._shared.get(key, 0) + 1
        if keys:
            self._keys[origin] = tuple(keys)
        else:
            self._keys.pop(origin, None)

    def _drop_reference(self, key: K) -> None:
        """Remove the entry if no other plan has it."""
        others = self._shared.pop(key, 0)
        if not others:
            del self._desired[key]
        elif others > 1:
            self._shared[key] = others - 1

    def _count(self, plan: ServicePortPlan, sign: int) -> None:
        """Add the figures of a plan to the sums for metrics, or subtract them: `sign` is 1 or -1."""
        self.endpoints += sign * len(plan.endpoints)
        internal, external = no_local_endpoints((plan,))
        of_family = self._no_local[plan.family]
        of_family[0] += sign * internal
        of_family[1] += sign * external
        self.needing_pods += sign * needs_packets_of_pods(plan)
        self._needing_node += sign * needs_packets_of_node(plan)
        self._addresses.count(plan, sign)

    def take_changed(self) -> Mapping[PlanKey, ServicePortPlan | None]:
        """Return the plans that changed since the last call, None for deleted ones."""
        changed, self._changed = self._changed, {}
        return changed

    def take_leftovers(self) -> frozenset[K]:
        """Return the keys in the kernel from a previous run that no plan has. Empty at further calls.

        They are the keys that were dropped up to the first successful sync.
        """
        leftovers, self._leftovers = self._leftovers, set()
        return frozenset(leftovers)

    def rejected(self) -> frozenset[PlanKey]:
        """Return the plans of which the kernel rejected entries in the last successful sync."""
        found = {origin for key, origin in self._rejections.origins() if key in self._keys.get(origin, ())}
        if shared := self._shared.keys() & self._rejections.keys():  # other plans have these entries, too
            found |= {origin for origin, keys in self._keys.items() if not shared.isdisjoint(keys)}
        return frozenset(origin for origin in found if origin)

    def holds(self, keys: Collection[K]) -> bool:
        """Return whether the kernel has the desired entries of all `keys` since the last successful sync.

        False if no sync has succeeded.
        """
        actual = self._actual or {}
        return all(key in actual and actual[key] == self._desired.get(key) for key in keys)

    @property
    def must_read(self) -> bool:
        """Whether the next sync reads everything, since none has succeeded or the last one failed."""
        return self._actual is None

    def is_modified_externally(self) -> bool:
        """Return whether another program has changed the kernel since the last successful sync.

        False if no sync has succeeded. Raises KernelError.
        """
        return self._actual is not None and self._backend.generation() != self._generation

    def check(self) -> Iterator[bool]:
        """Compare the kernel with what the last syncs left there, in steps of a few milliseconds.

        Yields after each step whether it found no difference; see `Backend.check`. Empty if no sync has
        succeeded. Raises KernelError.
        """
        return self._backend.check(self._actual) if self._actual is not None else iter(())

    def sync(self, verify: bool, retries: int = sys.maxsize) -> SyncResult:
        """Apply the difference between desired and actual entries. Retry up to `retries` rejected ones.

        With `verify`, or after a failure, read the kernel back and compare everything. Raises KernelError;
        the next call then compares everything.
        """
        expected = self._actual
        tried: Collection[K] = self._rejections.keys()
        try:
            if verify or self._actual is None:
                self._actual = None
                actual = self._backend.read()
                delta = diff(actual, self._desired)
                actual = _shared(actual, self._desired, delta.puts)
            else:
                actual = self._actual
                tried = dict.fromkeys((*self._rejections.next(retries), *self._touched))
                self._untried = max(0, (self._untried or len(self._rejections)) - retries)
                delta = self._with_rejected(diff(actual, self._desired, tried), tried)
            drifted = self._drifted(expected, actual) if verify and expected is not None else 0
            if not self._has_synced:
                self._leftovers |= delta.drops
            # Even an empty delta is applied when verifying: after a restart the backend then discards what
            # the previous run left.
            applies = verify or bool(delta)
            rejected = self._backend.apply(delta) if applies else {}
        except KernelError:
            self._actual = None
            raise
        for key, entry in delta.puts.items():
            if key not in rejected:
                actual[key] = entry
            elif rejected[key].in_force:
                actual.setdefault(key, entry)  # it is dropped once it is not desired, and retried until then
        dropped = delta.drops - rejected.keys()
        for key in dropped:
            actual.pop(key, None)
        self._actual, self._has_synced = actual, True
        if applies:  # otherwise `_generation` would include changes by other programs that were not read
            self._generation = self._backend.generation()
        touched, self._touched = self._touched, {}
        self._report(tried, rejected, touched)
        unserved = sum(map(len, self._unserved.values()))
        put = len(delta.puts.keys() - rejected.keys())
        if verify or put or dropped:  # others may fit now
            self._untried = len(self._rejections) - len(rejected)
        self._untried += sum(isinstance(failure, NotYet) for failure in rejected.values())
        final = self._rejections.final + unserved
        return SyncResult(put, len(dropped), final, drifted, self._untried > 0)

    def _with_rejected(self, delta: Delta[K, E], tried: Collection[K]) -> Delta[K, E]:
        """Add the rejected entries among `tried` to the puts, even those that seem to be as desired.

        The kernel kept the previous version of such an entry, but another entry may have taken over some of
        its frontends.
        """
        puts = (key for key in tried if key in delta.puts or key in self._rejections)
        return Delta({key: self._desired[key] for key in puts if key in self._desired}, delta.drops)

    def _drifted(self, expected: Mapping[K, E], actual: Mapping[K, E]) -> int:
        """Log and count the entries that another program has changed. Of a rejected entry, the kernel may
        have a part."""
        difference = diff(actual, expected)
        changed = {*difference.puts, *difference.drops} - set(self._rejections.keys())
        if changed:
            log.warning(REPAIRED, entries=len(changed), first=min(map(str, changed)))
        return len(changed)

    def _report(
        self,
        tried: Iterable[K],
        rejected: Mapping[K, KernelError],
        touched: Mapping[K, PlanKey | None],
    ) -> None:
        """Record rejections. Log each one once until it ends or the kind of its reason changes, but no
        postponed one."""
        for key, failure in rejected.items():
            if not isinstance(failure, NotYet) and self._rejections.kind(key) != failure.kind:
                log.warning(NOT_SERVED, reason=failure.message, hint=failure.hint)
        unknown = {key for key in rejected if key not in touched and key not in self._rejections}
        plans = self._keys.items() if unknown else ()  # a verification tries all entries
        found = {key: origin for origin, keys in plans for key in unknown.intersection(keys)}
        self._rejections.record(tried, rejected, {**found, **touched})


def _shared(actual: Mapping[K, E], desired: Mapping[K, E], different: Collection[K]) -> dict[K, E]:
    """Return `actual` with the keys and entries of `desired`, which stay in memory, instead of equal ones."""
    shared = {key: entry for key, entry in desired.items() if key not in different}
    return shared | {key: entry for key, entry in actual.items() if key not in shared}
