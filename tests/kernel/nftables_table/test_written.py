"""What the nftables backend writes is what nft finds, and what nft wrote is what it reads."""

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
def test_nft_lists_what_was_written_and_it_is_read_back(plane: NftablesBackend, case: str) -> None:
    wanted = entries_of(load(case))
    assert not bring(plane, wanted)
    assert plane.read() == wanted
    assert listed() == wanted


def test_what_nft_wrote_is_read_as_it_lists_it(plane: NftablesBackend) -> None:
    """As of kube-proxy: comments of sets, timeouts of theirs, chains at named places, counters."""
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
    theirs = listed()
    assert isinstance(chain, ChainEntry)
    assert chain.rules[0].startswith("other: "), "a rule with a counter is none that we write"
    shown = theirs.pop(Chain(V4, "nat-prerouting"))
    assert isinstance(shown, ChainEntry)
    assert (chain.hook, chain.rules[1:]) == (shown.hook, shown.rules[1:])
    assert found == theirs


def test_what_another_version_hooked_elsewhere_is_hooked_anew(plane: NftablesBackend) -> None:
    run_nft("table ip kube-proxy { chain filter-input { type filter hook input priority -110; }; }")
    wanted = entries(plane)
    assert not bring(plane, wanted)
    assert plane.read() == listed() == wanted


def test_a_set_into_which_something_else_fits_is_made_anew(plane: NftablesBackend) -> None:
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


def test_ranges_change_where_they_touch_each_other(plane: NftablesBackend) -> None:
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


def test_a_service_of_very_many_endpoints_with_the_longest_names(plane: NftablesBackend) -> None:
    """A map of so many does not fit into one attribute."""
    one = plan("a" * 63, "fd00::1", endpoints=600, family=V6)
    long = dataclasses.replace(one, name=one.name._replace(namespace="b" * 63, port="c" * 63))
    wanted = entries(plane, long)
    assert not bring(plane, wanted)
    assert plane.read() == listed() == wanted


# Very many at once


@pytest.mark.parametrize("of", [V4, V6])
def test_very_many_services_are_brought_in_by_parts(
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
def test_of_very_many_what_is_refused_leads_nowhere(
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
