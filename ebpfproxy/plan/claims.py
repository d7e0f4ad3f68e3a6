"""Who gets a frontend that more than one port of a Service asks for.

Anybody who may write a Service may name any address in externalIPs, another Service's ClusterIP
included (CVE-2020-8554). kube-proxy serves the first of two claims in the order of a Go map, which is
random. Here the claim decides, never the order of events: a ClusterIP, which the API server allots,
goes before a NodePort, which it allots too, before a load balancer's address, which a controller
reports, before an external IP, which users write; among equals the smaller name wins.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import family
from ebpfproxy.model.service import NamespacedName, ServicePortName
from ebpfproxy.plan.service_plan import Frontend, FrontendKind, FrontendPlan, PlanKey, ServicePortPlan

_RANKS = {
    FrontendKind.CLUSTER_IP: 0,
    FrontendKind.NODE_PORT: 1,
    FrontendKind.LOAD_BALANCER: 2,
    FrontendKind.EXTERNAL_IP: 3,
}

_Claim = tuple[int, ServicePortName]
"""Rank of the kind and who claims; the smallest wins."""

_Plans = dict[PlanKey, ServicePortPlan]


class LostClaim(NamedTuple):
    """`loser` asked for `frontend`, which `winner` has."""

    frontend: Frontend
    loser: ServicePortName
    winner: ServicePortName


class Settlement(NamedTuple):
    """What an update changed: plans that are new or other than before, keys that are no more.

    `plans` are as in `Claims.plans`: without the frontends that they lost. `lost` are the claims that
    were lost by this very update; one that loses again to another winner is not reported again.
    """

    plans: tuple[ServicePortPlan, ...]
    removed: tuple[PlanKey, ...]
    lost: tuple[LostClaim, ...]


class Claims:
    """The book of all plans, each with the frontends that it has got; kept up to date Service by Service.

    What is in it depends on the plans that were given last for each Service, not on the order of the
    updates. An update costs as much as the Service is large, whatever the size of the book.
    """

    def __init__(self) -> None:
        self._asked: dict[NamespacedName, _Plans] = {}
        self._in_force: _Plans = {}
        self._claims: dict[Frontend, list[_Claim]] = {}
        self.conflicts = 0
        """How many frontends more than one port of a Service asks for."""

    @property
    def plans(self) -> Mapping[PlanKey, ServicePortPlan]:
        """All plans in force. Read only; it goes along with later updates."""
        return self._in_force

    def update(self, service: NamespacedName, plans: Iterable[ServicePortPlan]) -> Settlement:
        """`plans` are all those of `service` from now on, as `plan_service` made them; none: it is gone."""
        before = self._asked.get(service, {})
        after = {plan.key: plan for plan in plans}
        if after:
            self._asked[service] = after
        else:
            self._asked.pop(service, None)
        contest = self._exchange(before, after)
        touched = before.keys() | after.keys()
        if contest:
            touched |= contest.touched(self._claims)
        return self._settle(touched, contest.lost(self._claims) if contest else ())

    def _exchange(self, before: _Plans, after: _Plans) -> "_Contest | None":
        """Let go of claims no longer made, then make the new ones; None where no other Service is
        concerned."""
        contest = None
        dropped, made = [], []
        for key in before.keys() | after.keys():
            old, new = before.get(key), after.get(key)
            if old and new and _same_claims(old.frontends, new.frontends):
                continue
            was, is_now = _claims_of(old), _claims_of(new)
            dropped += [each for each in was if each not in is_now]
            made += [each for each in is_now if each not in was]
        for frontend, claim in dropped:
            claims = self._claims[frontend]
            if len(claims) == 1:
                del self._claims[frontend]
                continue
            contest = contest or _Contest()
            contest.winners.setdefault(frontend, claims[0])
            del claims[bisect.bisect_left(claims, claim)]
            self.conflicts -= len(claims) == 1
        for frontend, claim in made:
            claims = self._claims.setdefault(frontend, [])
            if claims:
                contest = contest or _Contest()
                contest.winners.setdefault(frontend, claims[0])
                contest.made.append((frontend, claim))
            bisect.insort(claims, claim)
            self.conflicts += len(claims) == 2
        return contest

    def _settle(self, touched: Iterable[PlanKey], lost: tuple[LostClaim, ...]) -> Settlement:
        """Bring `plans` up to date for the keys `touched`."""
        changed, removed = [], []
        for key in touched:
            plan = self._effective(key)
            earlier = self._in_force.get(key)
            if plan is None:
                removed.append(key)
                del self._in_force[key]
            elif plan != earlier:
                changed.append(plan)
                self._in_force[key] = plan
        if len(changed) > 1:
            changed.sort(key=lambda plan: _order(plan.key))
        return Settlement(tuple(changed), tuple(sorted(removed, key=_order)), lost)

    def _effective(self, key: PlanKey) -> ServicePortPlan | None:
        name = key[0]
        plan = self._asked.get(NamespacedName(name.namespace, name.name), {}).get(key)
        if plan is None:
            return None
        kept = tuple(each for each in plan.frontends if self._claims[each.frontend][0][1] == name)
        return plan if len(kept) == len(plan.frontends) else dataclasses.replace(plan, frontends=kept)


class _Contest:
    """The frontends of one update that more than one claims: who had them before, who is new to them."""

    def __init__(self) -> None:
        self.winners: dict[Frontend, _Claim] = {}
        self.made: list[tuple[Frontend, _Claim]] = []

    def touched(self, claims: Mapping[Frontend, list[_Claim]]) -> set[PlanKey]:
        """The ports that had such a frontend before, or have it now."""
        names = {(claim[1], frontend) for frontend, claim in self.winners.items()}
        names |= {(claims[frontend][0][1], frontend) for frontend in self.winners if frontend in claims}
        return {(name, family(frontend.address)) for name, frontend in names}

    def lost(self, claims: Mapping[Frontend, list[_Claim]]) -> tuple[LostClaim, ...]:
        """Claims made now, or successful before, that stand and do not succeed."""
        lost = set()
        for frontend, claim in [*self.made, *self.winners.items()]:
            standing = claims.get(frontend, [])
            if claim in standing and claim != standing[0]:
                lost.add(LostClaim(frontend, claim[1], standing[0][1]))
        return tuple(sorted(lost))


def _claims_of(plan: ServicePortPlan | None) -> list[tuple[Frontend, _Claim]]:
    return [(each.frontend, (_RANKS[each.kind], plan.name)) for each in plan.frontends] if plan else []


def _same_claims(old: tuple[FrontendPlan, ...], new: tuple[FrontendPlan, ...]) -> bool:
    """Whether only what is done with the frontends differs, if anything does."""
    if old == new:
        return True
    return [(each.frontend, each.kind) for each in old] == [(each.frontend, each.kind) for each in new]


def _order(key: PlanKey) -> tuple[ServicePortName, str]:
    return key[0], key[1].value
