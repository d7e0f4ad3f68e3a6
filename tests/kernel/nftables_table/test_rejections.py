"""Entries that the kernel rejects do not prevent the others."""

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE, Chain, ChainEntry, Set
from ebpfproxy.model.address import Family
from tests.contract.test_backend import plan
from tests.kernel.nftables_table.tables import (
    bring,
    endpoint_chain,
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


def test_a_service_whose_change_is_rejected_stays_unchanged(plane: NftablesBackend) -> None:
    before = entries(plane, plan("web", "10.96.0.1", endpoints=2, affinity=9))
    bring(plane, before)
    changed = plan("web", "10.96.0.1", endpoints=3, affinity=9)
    wanted = entries(plane, changed, other := plan("other", "10.96.0.2"))
    service = service_chain(wanted, "web")
    (added,) = (key for key in wanted.keys() - before.keys() if "chain endpoint-" in str(key))
    (clients,) = (key for key in wanted.keys() - before.keys() if isinstance(key, Set))
    chain = wanted[added]
    assert isinstance(chain, ChainEntry)
    wanted[added] = chain._replace(rules=("goto nowhere",))
    rejected = bring(plane, wanted)
    assert rejected.keys() == {service, added}
    assert plane.read() == before | plane.render((other,), None) | {clients: wanted[clients]}


@pytest.mark.parametrize("rule", ["goto nowhere", "what is this"])
def test_chains_in_use_stay_if_the_change_of_their_service_is_rejected(
    plane: NftablesBackend, rule: str
) -> None:
    """The Service keeps both endpoints, though one of them was removed: its change is rejected."""
    before = entries(plane, plan("web", "10.96.0.1", endpoints=2, affinity=9))
    bring(plane, before)
    wanted = entries(plane, plan("web", "10.96.0.1", endpoints=1, affinity=9))
    service = service_chain(wanted, "web")
    wanted[service] = ChainEntry("", (rule,))
    rejected = bring(plane, wanted)
    assert rejected.keys() == {service} | (before.keys() - wanted.keys())
    assert plane.read() == before


@pytest.mark.parametrize("rule", ["what is this", "ip saddr @nothing drop", "masquerade fully-random"])
def test_only_the_invalid_rule_is_rejected(plane: NftablesBackend, rule: str) -> None:
    """A rule that cannot be parsed, one that refers to a missing set, and one that its chain's type does not
    allow. For the last one the kernel also rejects all later messages."""
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
    served = entries(plane, plan("web", "10.96.0.1", affinity=9))
    bring(plane, served)
    wanted = entries(plane)
    endpoint = endpoint_chain(served, "web")
    run_nft(f"table ip {TABLE} {{ chain foreign {{ goto {endpoint.name}; }}; }}")
    foreign = {Chain(V4, "foreign"): ChainEntry("", (f"goto {endpoint.name}",))}
    assert not plane.apply(diff(plane.read(), wanted | foreign))
    assert plane.read() == wanted | foreign, "a chain that waits for its deletion is not listed"
    assert listed()[endpoint] == ChainEntry("", ())
    run_nft(f"delete chain ip {TABLE} foreign")
    plane.read()
    plane.apply(Delta({}, frozenset()))
    assert endpoint in listed(), "too early"
    clock.now += 2
    plane.apply(Delta({}, frozenset()))
    assert listed() == wanted


def test_a_chain_that_waits_for_its_deletion_can_be_used_again(plane: NftablesBackend, clock: Clock) -> None:
    served = entries(plane, plan("web", "10.96.0.1", affinity=9))
    bring(plane, served)
    endpoint = endpoint_chain(served, "web")
    foreign = {Chain(V4, "foreign"): ChainEntry("", (f"goto {endpoint.name}",))}
    bring(plane, served | foreign)
    bring(plane, entries(plane) | foreign)
    assert not bring(plane, served | foreign)
    clock.now += 2
    plane.apply(Delta({}, frozenset()))
    assert plane.read() == listed() == served | foreign
