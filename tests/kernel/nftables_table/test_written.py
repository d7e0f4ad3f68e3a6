"""`nft` lists what the nftables backend wrote, and the backend reads what `nft` wrote."""

import dataclasses

import pytest

from ebpfproxy.backends.nftables import table
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import Chain, ChainEntry
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.service_plan import NodePlan
from tests.contract.test_backend import plan
from tests.golden.nftables_text import entries_of
from tests.golden.situation import load, situations
from tests.kernel.nftables_table.tables import bring, entries, leading, listed, run_nft, spoil

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
    found = plane.read()
    chain = found.pop(Chain(V4, "nat-prerouting"))
    shown_by_nft = listed()
    assert isinstance(chain, ChainEntry)
    assert chain.rules[0].startswith("other: "), "the backend writes no rules with counters"
    shown = shown_by_nft.pop(Chain(V4, "nat-prerouting"))
    assert isinstance(shown, ChainEntry)
    assert (chain.hook, chain.rules[1:]) == (shown.hook, shown.rules[1:])
    assert found == shown_by_nft


def test_a_chain_with_another_hook_is_created_again(plane: NftablesBackend) -> None:
    run_nft("table ip kube-proxy { chain filter-input { type filter hook input priority -110; }; }")
    wanted = entries(plane)
    assert not bring(plane, wanted)
    assert plane.read() == listed() == wanted


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
    assert plane.read() == listed() == wanted


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
        assert plane.read() == listed() == wanted


def test_a_service_with_600_endpoints_and_the_longest_names_is_written(plane: NftablesBackend) -> None:
    """A map with so many endpoints does not fit into one attribute."""
    one = plan("a" * 63, "fd00::1", endpoints=600, family=V6)
    long = dataclasses.replace(one, name=one.name._replace(namespace="b" * 63, port="c" * 63))
    wanted = entries(plane, long)
    assert not bring(plane, wanted)
    assert plane.read() == listed() == wanted


# Large changes


@pytest.mark.parametrize("of", [V4, V6])
def test_a_large_change_is_written_in_parts(
    plane: NftablesBackend, monkeypatch: pytest.MonkeyPatch, of: Family
) -> None:
    monkeypatch.setattr(table, "_LARGE", 20)
    monkeypatch.setattr(table, "_SETS_IN_A_PART", 3)
    monkeypatch.setattr(table, "_CHAINS_IN_A_PART", 7)
    prefix = "10.96.0." if of is V4 else "fd00::"
    plans = [plan(f"web-{n}", f"{prefix}{n}", endpoints=3, family=of, affinity=n % 2) for n in range(1, 30)]
    wanted = entries(plane, *plans)
    assert not bring(plane, wanted)
    assert plane.read() == listed() == wanted
    again = entries(plane, *(dataclasses.replace(each, affinity_timeout=7) for each in plans))
    assert not bring(plane, again)
    assert plane.read() == again


@pytest.mark.parametrize("rule", ["goto nowhere", "what is this"])
def test_a_service_rejected_in_a_large_change_is_not_reachable(
    plane: NftablesBackend, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr(table, "_LARGE", 0)
    monkeypatch.setattr(table, "_SETS_IN_A_PART", 1000)
    good, bad = plan("good", "10.96.0.1"), plan("bad", "10.96.0.2")
    wanted = entries(plane, good, bad)
    spoil(wanted, "bad", rule)
    rejected = bring(plane, wanted)
    assert rejected.keys() == leading(plane, bad)
    assert plane.read() == {key: entry for key, entry in wanted.items() if key not in rejected}
