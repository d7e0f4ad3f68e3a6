"""Frontend conflicts: which ServicePort gets a frontend that several ServicePorts claim.

Every user who may write a Service may put any address into externalIPs, even the ClusterIP of another Service
(CVE-2020-8554). kube-proxy serves one of two claims at random, in the order of a Go map. Here the kind of the
frontend decides, never the order of events:

1. ClusterIP, which the API server allocates;
2. NodePort, which the API server allocates, too;
3. load balancer IP, which a controller reports;
4. external IP, which users write;
5. host port, which users write into pods.

Of two claims of the same kind, that of the smaller `namespace/name:port` wins.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import family
from ebpfproxy.model.service import NamespacedName, ServicePortName
from ebpfproxy.plan.host_ports import is_host_port
from ebpfproxy.plan.service_plan import Frontend, FrontendKind, FrontendPlan, PlanKey, ServicePortPlan

_RANKS = {
    FrontendKind.CLUSTER_IP: 0,
    FrontendKind.NODE_PORT: 1,
    FrontendKind.LOAD_BALANCER: 2,
    FrontendKind.EXTERNAL_IP: 3,
}

_HOST_PORT_RANK = 4

_Claim = tuple[int, ServicePortName]
"""The rank of the frontend's kind, and the claiming ServicePort. The smallest claim wins."""

_Plans = dict[PlanKey, ServicePortPlan]


class LostClaim(NamedTuple):
    """`loser` claims `frontend`, but `winner` gets it."""

    frontend: Frontend
    loser: ServicePortName
    winner: ServicePortName


class ClaimsUpdate(NamedTuple):
    """The result of an update: new or changed plans, keys of deleted plans, and lost claims.

    `plans` are as in `Claims.plans`: without the frontends that they lost. `lost` are the claims that this
    update lost. A claim that was lost before and now loses to another winner is not reported again.
    `previous` are the plans that were replaced or deleted.
    """

    plans: tuple[ServicePortPlan, ...]
    removed: tuple[PlanKey, ...]
    lost: tuple[LostClaim, ...]
    previous: tuple[ServicePortPlan, ...] = ()


class Claims:
    """All plans, each with the frontends that it gets; updated Service by Service.

    The content depends only on the last plans of each Service, not on the order of updates. The cost of an
    update depends on the size of the Service, not on the number of Services.
    """

    def __init__(self) -> None:
        self._requested: dict[NamespacedName, tuple[ServicePortPlan, ...]] = {}
        self._plans: _Plans = {}
        self._winners: dict[Frontend, _Claim] = {}
        self._losers: dict[Frontend, list[_Claim]] = {}  # sorted; only frontends with several claims

    @property
    def conflicts(self) -> int:
        """The number of frontends that more than one ServicePort claims."""
        return len(self._losers)

    @property
    def plans(self) -> Mapping[PlanKey, ServicePortPlan]:
        """All plans with the frontends that they get. A read-only view: later updates change it."""
        return self._plans

    def update(self, service: NamespacedName, plans: Iterable[ServicePortPlan]) -> ClaimsUpdate:
        """Replace the plans of `service`, results of `plan_service`. No plans: the Service was deleted."""
        before = {plan.key: plan for plan in self._requested.get(service, ())}
        after = {plan.key: plan for plan in plans}
        after |= {key: old for key, old in before.items() if old == after.get(key)}  # one object for both
        if after:
            self._requested[service] = tuple(after.values())
        else:
            self._requested.pop(service, None)
        conflicts = self._replace_claims(before, after)
        requested = {key: after.get(key) for key in before.keys() | after.keys()}
        if not conflicts:
            return self._update_plans(requested, ())
        for key in conflicts.touched(self._winners) - requested.keys():
            requested[key] = self._requested_plan(key)
        return self._update_plans(requested, conflicts.lost(self._winners, self._losers))

    def _replace_claims(self, before: _Plans, after: _Plans) -> "_Conflicts | None":
        """Drop the old claims, then add the new ones. Return the conflicts concerned, None without any."""
        conflicts = None
        dropped, added = [], []
        for key in before.keys() | after.keys():
            old, new = before.get(key), after.get(key)
            if old and new and _same_claims(old.frontends, new.frontends):
                continue
            old_claims, new_claims = _claims_of(old), _claims_of(new)
            dropped += [each for each in old_claims if each not in new_claims]
            added += [each for each in new_claims if each not in old_claims]
        for frontend, claim in dropped:
            if frontend in self._losers:
                conflicts = conflicts or _Conflicts()
                conflicts.winners.setdefault(frontend, self._winners[frontend])
            self._drop_claim(frontend, claim)
        for frontend, claim in added:
            if frontend in self._winners:
                conflicts = conflicts or _Conflicts()
                conflicts.winners.setdefault(frontend, self._winners[frontend])
                conflicts.added.append((frontend, claim))
            self._add_claim(frontend, claim)
        return conflicts

    def _add_claim(self, frontend: Frontend, claim: _Claim) -> None:
        if frontend in self._winners:
            winner, loser = sorted((self._winners[frontend], claim))
            bisect.insort(self._losers.setdefault(frontend, []), loser)
            claim = winner
        self._winners[frontend] = claim

    def _drop_claim(self, frontend: Frontend, claim: _Claim) -> None:
        losers = self._losers.get(frontend)
        if losers is None:
            del self._winners[frontend]
        elif claim == self._winners[frontend]:
            self._winners[frontend] = losers.pop(0)
        else:
            del losers[bisect.bisect_left(losers, claim)]
        if losers == []:
            del self._losers[frontend]

    def _update_plans(
        self, requested: Mapping[PlanKey, ServicePortPlan | None], lost: tuple[LostClaim, ...]
    ) -> ClaimsUpdate:
        """Update `plans` for the keys of `requested`, which has None for deleted plans."""
        changed, removed, previous = [], [], []
        for key, wanted in requested.items():
            plan = self._with_won_frontends(wanted) if wanted else None
            old = self._plans.get(key)
            if plan == old:
                continue
            if old:
                previous.append(old)
            if plan:
                changed.append(plan)
                self._plans[key] = plan
            else:
                removed.append(key)
                del self._plans[key]
        if len(changed) > 1:
            changed.sort(key=lambda plan: _order(plan.key))
        return ClaimsUpdate(tuple(changed), tuple(sorted(removed, key=_order)), lost, tuple(previous))

    def _requested_plan(self, key: PlanKey) -> ServicePortPlan | None:
        """Return the plan with all frontends that it claims."""
        name = key[0]
        plans = self._requested.get(NamespacedName(name.namespace, name.name), ())
        return next((plan for plan in plans if plan.key == key), None)

    def _with_won_frontends(self, plan: ServicePortPlan) -> ServicePortPlan:
        if not self._losers:
            return plan
        kept = tuple(each for each in plan.frontends if self._winners[each.frontend][1] == plan.name)
        return plan if len(kept) == len(plan.frontends) else dataclasses.replace(plan, frontends=kept)


class _Conflicts:
    """The frontends with several claims that one update concerns.

    `winners` are their winners before the update; `added` are the claims that the update adds.
    """

    def __init__(self) -> None:
        self.winners: dict[Frontend, _Claim] = {}
        self.added: list[tuple[Frontend, _Claim]] = []

    def touched(self, winners: Mapping[Frontend, _Claim]) -> set[PlanKey]:
        """Return the keys of the plans that got such a frontend before the update, or get it now."""
        names = {(claim[1], frontend) for frontend, claim in self.winners.items()}
        names |= {(winners[frontend][1], frontend) for frontend in self.winners if frontend in winners}
        return {(name, family(frontend.address)) for name, frontend in names}

    def lost(
        self, winners: Mapping[Frontend, _Claim], losers: Mapping[Frontend, list[_Claim]]
    ) -> tuple[LostClaim, ...]:
        """Return the claims that exist and do not win, if they are new or won before the update."""
        lost = set()
        for frontend, claim in [*self.added, *self.winners.items()]:
            if claim in losers.get(frontend, ()):
                lost.add(LostClaim(frontend, claim[1], winners[frontend][1]))
        return tuple(sorted(lost))


def _claims_of(plan: ServicePortPlan | None) -> list[tuple[Frontend, _Claim]]:
    if plan is None:
        return []
    if is_host_port(plan.name):
        return [(each.frontend, (_HOST_PORT_RANK, plan.name)) for each in plan.frontends]
    return [(each.frontend, (_RANKS[each.kind], plan.name)) for each in plan.frontends]


def _same_claims(old: tuple[FrontendPlan, ...], new: tuple[FrontendPlan, ...]) -> bool:
    """Return whether both have the same frontends of the same kinds, whatever their policies."""
    if old == new:
        return True
    return [(each.frontend, each.kind) for each in old] == [(each.frontend, each.kind) for each in new]


def _order(key: PlanKey) -> tuple[ServicePortName, str]:
    return key[0], key[1].value
