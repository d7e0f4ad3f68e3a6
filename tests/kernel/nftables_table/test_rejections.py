"""Entries that the kernel rejects do not prevent the others."""

import dataclasses

import pytest

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE, Chain, ChainEntry, Endpoints
from ebpfproxy.errors import NotFound
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import NftablesCounts
from ebpfproxy.plan.service_plan import FrontendKind, ServicePortPlan
from tests.contract.test_backend import plan
from tests.kernel.nftables_table.tables import (
    INVALID,
    NOWHERE,
    bring,
    entries,
    leading,
    listed,
    run_nft,
    service_chain,
    spoil,
)
from tests.support.clock import Clock

pytestmark = pytest.mark.kernel

V4, V6 = Family.IPV4, Family.IPV6


def test_a_rejected_service_does_not_prevent_others(plane: NftablesBackend) -> None:
    before = entries(plane, plan("good", "10.96.0.1"))
    bring(plane, before)
    wanted = entries(plane, plan("good", "10.96.0.1", endpoints=2), bad := plan("bad", "10.96.0.2"))
    service = spoil(wanted, "bad")
    rejected = bring(plane, wanted)
    assert rejected.keys() == leading(plane, bad)
    assert str(rejected[service]) == f"nftables: {service}: No such file or directory"
    assert plane.read() == {key: entry for key, entry in wanted.items() if key not in rejected}


def test_a_sync_with_a_rejection_is_counted_for_its_family(plane: NftablesBackend) -> None:
    bring(plane, entries(plane, plan("good", "10.96.0.1")))
    assert plane.report().syncs == (NftablesCounts(V4), NftablesCounts(V6))
    wanted = entries(plane, plan("good", "10.96.0.1"), plan("bad", "10.96.0.2"))
    spoil(wanted, "bad")
    assert bring(plane, wanted)
    assert plane.report().syncs == (NftablesCounts(V4, sync_failures=1), NftablesCounts(V6))


def test_a_failed_sync_is_counted_for_its_family(plane: NftablesBackend) -> None:
    bring(plane, entries(plane, plan("good", "10.96.0.1")))
    delta = diff(plane.read(), entries(plane, plan("good", "10.96.0.1"), plan("more", "10.96.0.2")))
    run_nft(f"delete table ip {TABLE}")
    with pytest.raises(NotFound):
        plane.apply(delta)
    assert plane.report().syncs == (NftablesCounts(V4, sync_failures=1), NftablesCounts(V6))


def test_a_service_whose_change_is_rejected_has_its_previous_rules(plane: NftablesBackend) -> None:
    """Its list of endpoints is as desired. So the previous rules select from it."""
    before = entries(plane, plan("web", "10.96.0.1", endpoints=2, affinity=9))
    bring(plane, before)
    changed = plan("web", "10.96.0.1", endpoints=3, affinity=9)
    wanted = entries(plane, changed, other := plan("other", "10.96.0.2"))
    service = spoil(wanted, "web")
    rejected = bring(plane, wanted)
    assert rejected.keys() == {service}
    (listed_of_web,) = (key for key in before if isinstance(key, Endpoints))
    assert plane.read() == before | plane.render((other,), None) | {listed_of_web: wanted[listed_of_web]}


@pytest.mark.parametrize("rule", [NOWHERE, INVALID], ids=["no chain", "invalid"])
def test_chains_in_use_stay_if_the_change_of_what_uses_them_is_rejected(
    plane: NftablesBackend, rule: Rule
) -> None:
    """The policy of the ClusterIP changes, but the external chain still goes to the previous chain."""
    before = entries(plane, external("web"))
    bring(plane, before)
    wanted = {key: entry for key, entry in before.items() if key != service_chain(before, "web")}
    chain = next(key for key in before if isinstance(key, Chain) and key.name.startswith("external-"))
    wanted[chain] = ChainEntry("", (rule,))
    rejected = bring(plane, wanted)
    assert rejected.keys() == {chain, service_chain(before, "web")}
    assert plane.read() == before


def external(name: str) -> ServicePortPlan:
    """A Service with a load balancer only."""
    of = plan(name, "203.0.113.1")
    balancers = (each._replace(kind=FrontendKind.LOAD_BALANCER) for each in of.frontends)
    return dataclasses.replace(of, frontends=tuple(balancers))


@pytest.mark.parametrize(
    "rule", [INVALID, Rule("ip saddr @nothing drop"), Rule("masquerade fully-random")], ids=str
)
def test_only_the_invalid_rule_is_rejected(plane: NftablesBackend, rule: Rule) -> None:
    """A rule that cannot be converted, one that refers to a missing set, and one that its chain's type does
    not allow. For the last one the kernel also rejects all later messages."""
    wanted = entries(plane, plan("web", "10.96.0.1"))
    last = entries(plane, plan("web", "10.96.0.1"), plan("zulu", "10.96.0.2"))
    bad = Chain(V4, "filter-input")
    wanted[bad] = ChainEntry("type filter hook input priority 0; policy accept;", (rule,))
    rejected = bring(plane, {bad: wanted.pop(bad), **wanted, **{k: v for k, v in last.items() if k != bad}})
    assert rejected.keys() == {bad}
    assert plane.read() == {key: entry for key, entry in last.items() if key != bad}


def test_a_chain_that_is_still_referred_to_is_emptied_and_deleted_later(
    plane: NftablesBackend, clock: Clock
) -> None:
    """Before Linux 6.4 all chains stay referred to for a while."""
    served = entries(plane, plan("web", "10.96.0.1"))
    bring(plane, served)
    wanted = entries(plane)
    service = service_chain(served, "web")
    run_nft(f"table ip {TABLE} {{ chain foreign {{ goto {service.name}; }}; }}")
    foreign = {Chain(V4, "foreign"): ChainEntry("", (Rule(f"goto {service.name}"),))}
    assert not plane.apply(diff(plane.read(), wanted | foreign))
    assert plane.read() == wanted | foreign, "a chain that waits for its deletion is not listed"
    assert listed()[service] == ChainEntry("", ())
    run_nft(f"delete chain ip {TABLE} foreign")
    plane.read()
    plane.apply(Delta({}, frozenset()))
    assert service in listed(), "too early"
    clock.now += 2
    plane.apply(Delta({}, frozenset()))
    assert listed() == wanted


def test_a_chain_that_waits_for_its_deletion_can_be_used_again(plane: NftablesBackend, clock: Clock) -> None:
    served = entries(plane, plan("web", "10.96.0.1"))
    bring(plane, served)
    service = service_chain(served, "web")
    foreign = {Chain(V4, "foreign"): ChainEntry("", (Rule(f"goto {service.name}"),))}
    bring(plane, served | foreign)
    bring(plane, entries(plane) | foreign)
    assert not bring(plane, served | foreign)
    clock.now += 2
    plane.apply(Delta({}, frozenset()))
    assert plane.read() == served | foreign == listed()
