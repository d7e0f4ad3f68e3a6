"""Changed plans that are not rendered yet, and which of them are next."""

from collections.abc import Collection, Iterable, Mapping

from ebpfproxy.plan.claims import ClaimsUpdate
from ebpfproxy.plan.service_plan import Frontend, PlanKey, ServicePortPlan

Changes = dict[PlanKey, ServicePortPlan | None]
"""Plans by key, None for a deleted one."""

_PLAN_SIZE = 10  # what a plan costs besides its endpoints, in endpoints


class Parts:
    """Plans are taken in turns between namespaces, so that a large Service of one delays no other. Plans
    among which a frontend moves are taken together: it must be served at each moment."""

    def __init__(self) -> None:
        self._changes: Changes = {}
        self._sizes: dict[PlanKey, int] = {}
        self._waiting: dict[str, dict[PlanKey, None]] = {}  # by namespace, the next one first
        self._together: dict[PlanKey, set[PlanKey]] = {}  # only those that are not alone

    @property
    def namespaces(self) -> Collection[str]:
        """The namespaces that have plans here."""
        return self._waiting.keys()

    def add(self, update: ClaimsUpdate) -> None:
        """Add changed and deleted plans. They replace those of the same keys, in their places."""
        previous = {plan.key: plan for plan in update.previous}
        changes: Changes = {plan.key: plan for plan in update.plans} | dict.fromkeys(update.removed)
        for key, plan in changes.items():
            endpoints = max((len(each.endpoints) for each in (plan, previous.get(key)) if each), default=0)
            self._sizes[key] = endpoints + _PLAN_SIZE
            self._waiting.setdefault(_namespace(key), {})[key] = None
        self._changes |= changes
        if _moves_frontends(update.plans, previous):
            joined = set(changes).union(*(self._together.get(key, ()) for key in changes))
            self._together |= dict.fromkeys(joined, joined)

    def take(self, most: float) -> Changes:
        """Return some plans, which no longer wait. Their sizes add up to `most` at most, unless the first
        ones must be together."""
        taken: Changes = {}
        left = most
        while left > 0 and self._waiting:
            namespace, keys = next(iter(self._waiting.items()))
            key = next(iter(keys))
            group = self._together.get(key) or {key}
            size = sum(self._sizes[each] for each in group)
            if taken and size > left:
                break
            for each in group:
                taken[each] = self._take(each)
            left -= size
            if namespace in self._waiting:  # to the end: the others have the next turn
                self._waiting[namespace] = self._waiting.pop(namespace)
        return taken

    def _take(self, key: PlanKey) -> ServicePortPlan | None:
        namespace = _namespace(key)
        del self._waiting[namespace][key], self._sizes[key]
        if not self._waiting[namespace]:
            del self._waiting[namespace]
        self._together.pop(key, None)
        return self._changes.pop(key)


def _namespace(key: PlanKey) -> str:
    return key[0].namespace


def _moves_frontends(plans: Iterable[ServicePortPlan], previous: Mapping[PlanKey, ServicePortPlan]) -> bool:
    """Return whether a plan has a frontend that a previous plan of another key had."""
    owners: dict[Frontend, PlanKey] = {
        each.frontend: key for key, plan in previous.items() for each in plan.frontends
    }
    return any(owners.get(each.frontend, plan.key) != plan.key for plan in plans for each in plan.frontends)
