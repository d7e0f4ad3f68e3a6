"""Frontend conflicts: several ServicePorts claim one frontend."""

import random
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from ebpfproxy.model.address import Protocol, format_address
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.service import NamespacedName, Service
from ebpfproxy.plan.claims import Claims, ClaimsUpdate
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import PlanKey, ServicePortPlan
from tests.support import build
from tests.support.build import CONTEXT, endpoint, port, slice_of
from tests.support.examples import examples
from tests.support.strategies import exposed_services


def give(claims: Claims, service: Service, *slices: EndpointSlice) -> ClaimsUpdate:
    return claims.update(service.name, plan_service(service, slices, None, CONTEXT))


def remove(claims: Claims, service: Service) -> ClaimsUpdate:
    return claims.update(service.name, ())


def has(claims: Claims) -> dict[str, list[str]]:
    """Return the addresses that each ServicePort got, by its name."""
    return {
        str(plan.name): [format_address(each.frontend.address) for each in plan.frontends]
        for plan in claims.plans.values()
    }


ALPHA = build.service("alpha", ips=["10.96.0.1"], external=["203.0.113.1"])
BRAVO = build.service("bravo", ips=["10.96.0.2"], external=["203.0.113.1"])
BALANCED = build.service("zulu", ips=["10.96.0.3"], balancer=["203.0.113.1"])
THIEF = build.service("aaaa", ips=["10.96.0.4"], external=["10.96.0.2", "10.96.0.1"])


def test_a_plan_without_conflict_keeps_all_its_frontends() -> None:
    claims = Claims()
    (plan,) = plan_service(ALPHA, (), None, CONTEXT)
    settled = claims.update(ALPHA.name, [plan])
    assert settled == ClaimsUpdate((plan,), (), ())
    assert claims.plans == {plan.key: plan}
    assert claims.plans[plan.key] is plan


def test_of_two_claims_to_an_external_ip_the_smaller_name_wins() -> None:
    for order in ((ALPHA, BRAVO), (BRAVO, ALPHA)):
        claims = Claims()
        all_lost = [lost for service in order for lost in give(claims, service).lost]
        assert has(claims) == {
            "default/alpha": ["10.96.0.1", "203.0.113.1"],
            "default/bravo": ["10.96.0.2"],
        }
        assert [(str(lost.loser), str(lost.winner)) for lost in all_lost] == [
            ("default/bravo", "default/alpha")
        ]


def test_a_cluster_ip_wins_over_an_external_ip() -> None:
    """CVE-2020-8554 with a victim in this cluster."""
    claims = Claims()
    for service in (THIEF, ALPHA, BRAVO):
        give(claims, service)
    assert has(claims)["default/aaaa"] == ["10.96.0.4"]
    assert has(claims)["default/bravo"] == ["10.96.0.2"]


def test_a_load_balancer_ip_wins_over_an_external_ip() -> None:
    claims = Claims()
    give(claims, ALPHA)
    settled = give(claims, BALANCED)
    assert [str(plan.name) for plan in settled.plans] == ["default/alpha", "default/zulu"]
    assert has(claims) == {"default/alpha": ["10.96.0.1"], "default/zulu": ["10.96.0.3", "203.0.113.1"]}
    assert [str(lost.loser) for lost in settled.lost] == ["default/alpha"]


def test_a_frontend_that_its_winner_drops_goes_to_the_next_claim() -> None:
    claims = Claims()
    for service in (ALPHA, BRAVO, BALANCED):
        give(claims, service)
    settled = remove(claims, BALANCED)
    assert [str(plan.name) for plan in settled.plans] == ["default/alpha"]
    assert [str(key[0]) for key in settled.removed] == ["default/zulu"]
    assert settled.lost == ()  # bravo had lost before
    assert [str(plan.name) for plan in remove(claims, ALPHA).plans] == ["default/bravo"]
    assert has(claims) == {"default/bravo": ["10.96.0.2", "203.0.113.1"]}


def test_an_unchanged_plan_changes_nothing() -> None:
    claims = Claims()
    for service in (ALPHA, BRAVO):
        give(claims, service)
    for service in (ALPHA, BRAVO):
        assert give(claims, service) == ClaimsUpdate((), (), ())


def test_new_endpoints_of_a_loser_change_only_its_plan_and_report_no_loss() -> None:
    claims = Claims()
    for service in (ALPHA, BRAVO):
        give(claims, service)
    settled = give(claims, BRAVO, slice_of("bravo", endpoint()))
    assert [str(plan.name) for plan in settled.plans] == ["default/bravo"]
    assert settled.lost == ()
    assert has(claims)["default/bravo"] == ["10.96.0.2"]


def test_a_renamed_port_keeps_its_frontends() -> None:
    claims = Claims()
    give(claims, build.service("web", port(80, "a")))
    settled = give(claims, build.service("web", port(80, "b")))
    assert [str(plan.name) for plan in settled.plans] == ["default/web:b"]
    assert [str(key[0]) for key in settled.removed] == ["default/web:a"]
    assert settled.lost == ()


def test_claims_with_another_port_or_protocol_do_not_conflict() -> None:
    claims = Claims()
    give(claims, build.service("a", port(53), ips=["10.96.0.1"], external=["203.0.113.1"]))
    udp = build.service("b", port(53, protocol=Protocol.UDP), ips=["10.96.0.2"], external=["203.0.113.1"])
    assert give(claims, udp).lost == ()
    other = build.service("c", port(54), ips=["10.96.0.3"], external=["203.0.113.1"])
    assert give(claims, other).lost == ()


def test_deleting_an_unknown_service_changes_nothing() -> None:
    assert Claims().update(NamespacedName("default", "web"), ()) == ClaimsUpdate((), (), ())


_HISTORY = st.lists(exposed_services(), max_size=6)


@settings(max_examples=examples(200))
@given(_HISTORY, st.randoms(use_true_random=False))
def test_the_order_of_updates_does_not_matter(
    history: list[tuple[Service, tuple[EndpointSlice, ...]]], chance: random.Random
) -> None:
    """Only the last plans of each Service matter."""
    claims = Claims()
    followed: dict[PlanKey, ServicePortPlan] = {}
    last = {}
    for service, slices in history:
        plans = plan_service(service, slices, None, CONTEXT) if chance.random() < 0.8 else ()
        last[service.name] = plans
        _follow(followed, claims.update(service.name, plans), claims.plans)
    fresh = Claims()
    for name in chance.sample(sorted(last), len(last)):
        fresh.update(name, last[name])
    assert fresh.plans == claims.plans == followed
    _check_that_every_frontend_has_one_owner(claims.plans, last)


def _follow(
    followed: dict[PlanKey, ServicePortPlan], settled: ClaimsUpdate, book: Mapping[PlanKey, ServicePortPlan]
) -> None:
    """Maintain a copy of the plans only from the results of updates."""
    for key in settled.removed:
        del followed[key]
    for plan in settled.plans:
        assert followed.get(plan.key) != plan
        followed[plan.key] = plan
    for lost in settled.lost:
        owners = {p.name for p in book.values() for f in p.frontends if f.frontend == lost.frontend}
        assert owners == {lost.winner}
        assert lost.loser != lost.winner


def _check_that_every_frontend_has_one_owner(
    book: Mapping[PlanKey, ServicePortPlan], last: Mapping[NamespacedName, tuple[ServicePortPlan, ...]]
) -> None:
    served = [each.frontend for plan in book.values() for each in plan.frontends]
    asked = {each.frontend for plans in last.values() for plan in plans for each in plan.frontends}
    assert len(served) == len(set(served))
    assert set(served) == asked
