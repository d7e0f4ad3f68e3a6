"""`nft` lists what the nftables backend wrote, and the backend reads what `nft` wrote."""

import dataclasses
import re

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.nftables import table
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE, Chain, ChainEntry, Endpoints
from ebpfproxy.backends.nftables.shares import DRAWS
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.balancing import PlannedBalancing
from ebpfproxy.plan.service_plan import NodePlan
from tests.contract.test_backend import frontend, plan
from tests.golden.nftables_text import entries_of
from tests.golden.situation import load, situations
from tests.kernel.nftables_table.tables import (
    INVALID,
    NOWHERE,
    bring,
    entries,
    leading,
    listed,
    run_nft,
    spoil,
)
from tests.support.nft_listing import endpoint_elements

pytestmark = pytest.mark.kernel

V4, V6 = Family.IPV4, Family.IPV6


@pytest.mark.parametrize("case", situations())
def test_written_entries_are_listed_by_nft_and_read_back(plane: NftablesBackend, case: str) -> None:
    wanted = entries_of(load(case))
    assert not bring(plane, wanted)
    assert plane.read() == wanted
    assert listed() == wanted


def test_entries_that_nft_wrote_are_read_as_nft_lists_them(plane: NftablesBackend) -> None:
    """As kube-proxy writes them: comments and timeouts of sets, named chain priorities, counters."""
    run_nft(
        """
        table ip kube-proxy {
            comment "rules for kube-proxy"
            counter seen { }
            set cluster-ips {
                type ipv4_addr; comment "Active ClusterIPs"; elements = { 10.96.0.1, 10.96.0.10 };
            }
            set networks {
                type ipv4_addr; flags interval
                elements = { 10.0.0.0/8, 192.0.2.1-192.0.2.7, 240.0.0.0/4 };
            }
            map service-ips {
                type ipv4_addr . inet_proto . inet_service : verdict
                elements = { 10.96.0.1 . tcp . 80 comment "a/b:c" : goto reject-chain,
                             10.96.0.1 . udp . 53 : drop };
            }
            chain reject-chain { reject; }
            chain nat-prerouting { type nat hook prerouting priority dstnat; policy accept;
                ip daddr @networks counter accept
                ip saddr != { 10.0.0.0/8, 192.168.0.0/16 } drop
                ip daddr . meta l4proto . th dport vmap @service-ips; }
        }
        """
    )
    found, shown_by_nft = plane.read(), listed()
    for chain in (Chain(V4, "nat-prerouting"), Chain(V4, "reject-chain")):
        entry, shown = found.pop(chain), shown_by_nft.pop(chain)
        assert isinstance(entry, ChainEntry)
        assert isinstance(shown, ChainEntry)
        assert (entry.hook, len(entry.rules)) == (shown.hook, len(shown.rules))
        assert not any(rule.digest for rule in entry.rules)
    assert found == shown_by_nft


def test_a_rule_that_another_program_replaced_is_written_again(plane: NftablesBackend) -> None:
    """Its text is the same except for the verdict, and it keeps its place."""
    wanted = entries(plane, plan("web", "10.96.0.1"))
    bring(plane, wanted)
    (handle,) = re.findall(r"reject # handle (\d+)", run_nft(f"list chain ip {TABLE} reject-chain", "-a"))
    run_nft(f"replace rule ip {TABLE} reject-chain handle {handle} drop")
    assert diff(plane.read(), wanted).puts.keys() == {Chain(V4, "reject-chain")}
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


def test_a_chain_that_another_program_renamed_is_restored(plane: NftablesBackend) -> None:
    wanted = entries(plane, plan("web", "10.96.0.1"))
    bring(plane, wanted)
    run_nft(f"rename chain ip {TABLE} services elsewhere")
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


def test_the_listing_of_the_tables_is_accepted_as_input(plane: NftablesBackend) -> None:
    """Administrators save rulesets and load them at boot."""
    wanted = entries(plane, plan("web", "10.96.0.1", endpoints=3, affinity=9), plan("api", "10.96.0.2"))
    bring(plane, wanted)
    listing = run_nft("list ruleset")
    run_nft(f"flush ruleset; {listing}")
    assert listed() == wanted
    assert plane.read() != wanted, "the digests are not part of a listing"
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


def test_a_changed_list_of_endpoints_is_noticed_and_repaired(plane: NftablesBackend) -> None:
    wanted = entries(plane, plan("web", "10.96.0.1", endpoints=4))
    bring(plane, wanted)
    (key,) = (key for key in wanted if isinstance(key, Endpoints))
    elements = endpoint_elements(key, wanted[key])
    removed = ", ".join(each.partition(" : ")[0] for each in elements[1:3])
    added = elements[1].replace(" . 1 : 10.1.0.2", " . 4 : 10.1.0.9")
    for change in (
        f"delete element ip {TABLE} {key.container} {{ {removed} }}",
        f"add element ip {TABLE} {key.container} {{ {added} }}",
    ):
        run_nft(change)
        assert plane.read()[key] != wanted[key]
        assert not bring(plane, wanted)
        assert plane.read() == wanted == listed()


@pytest.mark.parametrize("of", [V4, V6])
@pytest.mark.parametrize("affinity", [0, 9])
def test_algorithms_and_weights_are_listed_by_nft_read_back_and_accepted_as_input(
    plane: NftablesBackend, of: Family, affinity: int
) -> None:
    plans = [
        dataclasses.replace(
            plan(f"web-{algorithm.value}-{number}", "10.96.0.1", endpoints=3, family=of, affinity=affinity),
            balancing=PlannedBalancing(algorithm, weights),
        )
        for algorithm in DRAWS
        for number, weights in enumerate(((), (1, 2, 300), (2, 4, 2)))
    ]
    plans = [
        dataclasses.replace(each, frontends=(frontend(f"{'10.96.0.' if of is V4 else 'fd00::'}{number}"),))
        for number, each in enumerate(plans, 1)
    ]
    wanted = entries(plane, *plans)
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()
    listing = run_nft("list ruleset")
    run_nft(f"flush ruleset; {listing}")
    assert listed() == wanted
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


@pytest.mark.parametrize("affinity", [0, 9])
def test_a_list_of_endpoints_grows_and_shrinks(plane: NftablesBackend, affinity: int) -> None:
    for endpoints in (3, 250, 1, 0, 2):
        wanted = entries(plane, plan("web", "10.96.0.1", endpoints=endpoints, affinity=affinity))
        assert not bring(plane, wanted)
        assert plane.read() == wanted == listed()


def test_a_chain_with_another_hook_is_created_again(plane: NftablesBackend) -> None:
    run_nft("table ip kube-proxy { chain filter-input { type filter hook input priority -110; }; }")
    wanted = entries(plane)
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


def test_a_set_of_another_type_is_created_again(plane: NftablesBackend) -> None:
    run_nft(
        """
        add table ip kube-proxy
        add set ip kube-proxy cluster-ips { type inet_service; }
        add element ip kube-proxy cluster-ips { 80 }
        add map ip kube-proxy service-ips { type ipv4_addr : mark; }
        """
    )
    wanted = entries(plane, plan("web", "10.96.0.1"))
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


def test_adjacent_ranges_can_be_changed(plane: NftablesBackend) -> None:
    for *texts, _ in (
        ("10.1.0.0/24", "10.3.0.0/24", ""),
        ("10.1.0.0/23", "10.3.0.0/24", ""),
        ("10.1.1.0/24", "10.1.4.0/22", ""),
        ("255.255.255.0/24", "0.0.0.0/8", ""),
    ):
        networks = frozenset(map(parse_network, texts))
        wanted = entries(plane, node=NodePlan(networks, networks, node_ports_everywhere=frozenset()))
        assert not bring(plane, wanted)
        assert plane.read() == wanted == listed()


def test_a_service_with_600_endpoints_and_the_longest_names_is_written(plane: NftablesBackend) -> None:
    """A map with so many endpoints does not fit into one attribute."""
    one = plan("a" * 63, "fd00::1", endpoints=600, family=V6)
    long = dataclasses.replace(one, name=one.name._replace(namespace="b" * 63, port="c" * 63))
    wanted = entries(plane, long)
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()


# Large changes


@pytest.mark.parametrize("of", [V4, V6])
def test_a_large_change_is_written_in_parts(
    plane: NftablesBackend, monkeypatch: pytest.MonkeyPatch, of: Family
) -> None:
    monkeypatch.setattr(table, "_LARGE", 20)
    monkeypatch.setattr(table, "_SETS_IN_A_PART", 3)
    monkeypatch.setattr(table, "_STEPS_IN_A_PART", 7)
    prefix = "10.96.0." if of is V4 else "fd00::"
    plans = [plan(f"web-{n}", f"{prefix}{n}", endpoints=3, family=of, affinity=n % 2) for n in range(1, 30)]
    wanted = entries(plane, *plans)
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()
    again = entries(plane, *(dataclasses.replace(each, affinity_timeout=7) for each in plans))
    assert not bring(plane, again)
    assert plane.read() == again


@pytest.mark.parametrize("rule", [NOWHERE, INVALID], ids=["no chain", "invalid"])
def test_a_service_rejected_in_a_large_change_is_not_reachable(
    plane: NftablesBackend, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    monkeypatch.setattr(table, "_LARGE", 0)
    monkeypatch.setattr(table, "_SETS_IN_A_PART", 1000)
    good, bad = plan("good", "10.96.0.1"), plan("bad", "10.96.0.2")
    wanted = entries(plane, good, bad)
    spoil(wanted, "bad", rule)
    rejected = bring(plane, wanted)
    assert rejected.keys() == leading(plane, bad)
    assert plane.read() == {key: entry for key, entry in wanted.items() if key not in rejected}
