"""What others do to our tables of nftables, what a previous run left, and what the machine lacks."""

import os

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.nftables import coexistence, probes
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE
from ebpfproxy.errors import NotFound, Unsupported
from ebpfproxy.linux.nft import encoding, messages
from ebpfproxy.linux.nft.expressions import Masquerade
from ebpfproxy.model.address import Family
from tests.contract.test_backend import plan
from tests.kernel.nftables_table.tables import bring, entries, listed, run_nft
from tests.support.clock import Clock

pytestmark = pytest.mark.kernel

V4, V6 = Family.IPV4, Family.IPV6
NOBODY = 65534


def test_our_own_changes_and_others_tables_are_no_disturbance(plane: NftablesBackend) -> None:
    bring(plane, entries(plane))
    bring(plane, entries(plane, plan("web", "10.96.0.1")))
    before = plane.generation()
    run_nft("table ip other { chain one { type filter hook input priority 0; }; }; table inet kube-proxy { }")
    assert plane.generation() == plane.generation() == before


@pytest.mark.parametrize(
    "change",
    [
        f"add chain ip {TABLE} theirs",
        f"flush chain ip {TABLE} services",
        f"delete element ip {TABLE} cluster-ips {{ 10.96.0.1 }}",
        f"insert rule ip6 {TABLE} services drop",
        f"delete table ip {TABLE}",
        "flush ruleset",
    ],
)
def test_what_somebody_changes_is_noticed_and_mended(plane: NftablesBackend, change: str) -> None:
    wanted = entries(plane, plan("web", "10.96.0.1"))
    bring(plane, wanted)
    before = plane.generation()
    run_nft(change)
    assert plane.generation() != before
    assert plane.read() != wanted
    assert not bring(plane, wanted)
    assert plane.read() == listed() == wanted
    assert plane.generation() == plane.generation()


def test_a_disturbance_just_before_our_own_change_is_not_forgotten(plane: NftablesBackend) -> None:
    """A proxier remembers the generation after its sync: it must not be that of an unread table."""
    bring(plane, entries(plane))
    run_nft(f"add chain ip {TABLE} theirs")
    wanted = entries(plane, plan("web", "10.96.0.1"))
    plane.apply(diff(entries(plane), wanted))
    before = plane.generation()
    assert plane.generation() != before
    assert not bring(plane, wanted)
    assert plane.read() == wanted


def test_many_changes_of_others_do_not_hide_one_of_ours(
    plane: NftablesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(plane, entries(plane))
    before = plane.generation()
    chains = "\n".join(f"add chain ip other chain-{n}" for n in range(20_000))
    run_nft(f"add table ip other\n{chains}")
    run_nft(f"add chain ip {TABLE} theirs")
    assert plane.generation() != before


def test_a_table_that_is_gone_when_it_is_to_be_changed_is_an_error(plane: NftablesBackend) -> None:
    wanted = entries(plane, plan("web", "10.96.0.1"))
    bring(plane, wanted)
    run_nft("flush ruleset")
    more = entries(plane, plan("web", "10.96.0.1"), plan("api", "10.96.0.2"))
    with pytest.raises(NotFound, match="cannot change table ip kube-proxy: another program removed it"):
        plane.apply(diff(wanted, more))
    assert not bring(plane, more)
    assert plane.read() == listed() == more


# A previous run


def test_what_a_previous_run_left_goes_on_and_only_the_difference_is_written(clock: Clock) -> None:
    previous = NftablesBackend(clock=clock)
    previous.open()
    left = entries(previous, plan("web", "10.96.0.1"), plan("gone", "10.96.0.2"))
    bring(previous, left)
    previous.close()
    before = run_nft(f"list table ip {TABLE}")
    plane = NftablesBackend(clock=clock)
    plane.open()
    assert run_nft(f"list table ip {TABLE}") == before, "to open it changes nothing"
    wanted = entries(plane, plan("web", "10.96.0.1"), plan("new", "10.96.0.3"))
    delta = diff(plane.read(), wanted)
    assert delta.puts.keys() == wanted.keys() - left.keys()
    assert not plane.apply(delta)
    assert plane.read() == listed() == wanted
    plane.close()
    assert listed() == wanted


def test_a_change_comes_upon_what_a_previous_run_left_though_nobody_has_read_it(clock: Clock) -> None:
    for plans in ([plan("web", "10.96.0.1", endpoints=2)], [plan("web", "10.96.0.1", endpoints=3)]):
        plane = NftablesBackend(clock=clock)
        plane.open()
        wanted = entries(plane, *plans)
        assert not plane.apply(Delta(wanted, frozenset()))
        plane.close()
        assert listed() == wanted


# What the machine has


def test_this_machine_has_all_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coexistence.SKIP, "1")  # so that it may have any kernel
    assert [str(each) for each in probes.probe()] == [
        "nftables for IPv4: present",
        "nftables for IPv6: present",
        "NAT chains besides those of other programs: present",
        f"{coexistence.FEATURE}: present",
    ]
    assert run_nft("list ruleset") == "", "nothing stays of the probes"


def test_what_a_kernel_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had no such expression: the message asks for one that no kernel has."""
    monkeypatch.setitem(encoding._ENCODE, Masquerade, ("nonsense", lambda each: ()))
    encoding._encode.cache_clear()
    try:
        found = probes.probe()
    finally:
        encoding._encode.cache_clear()
    assert [each.needed for each in found] == [True, True]
    assert str(found[0]) == "nftables for IPv4: this kernel lacks masquerading (ENOENT)"
    assert found[0].remedy == "modprobe -a nft_masq"


@pytest.mark.parametrize(
    "used",
    [{Family.IPV4}, {Family.IPV6}, set(Family), set()],
    # Not ids=str: two workers of one run would order the set, and so name the test, differently.
    ids=["ipv4", "ipv6", "both", "neither"],
)
def test_a_family_that_is_missing_is_preferred_where_the_node_uses_it(
    monkeypatch: pytest.MonkeyPatch, used: set[Family]
) -> None:
    """Its table is rejected, as by a kernel without CONFIG_NF_TABLES_IPV6."""
    monkeypatch.setitem(messages._FAMILIES, "ip6", 200)  # no NFPROTO_* of any kernel
    v4, v6, *_ = probes.probe(used)
    assert v4.present
    assert (v6.present, v6.needed, v6.preferred) == (False, False, Family.IPV6 in used)
    assert v4.preferred is (Family.IPV4 in used)
    assert "CONFIG_NF_TABLES_IPV6" in v6.remedy


def test_a_nat_that_is_never_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Linux 4.18; here since there is no rule in it."""
    whole = coexistence._operations
    monkeypatch.setattr(coexistence, "_operations", lambda port: whole(port)[:-1])
    *families, nat, _ = probes.probe()
    assert all(each.present for each in families)
    assert (nat.needed, nat.present) == (True, False)


def test_without_the_right_to_change_nftables_it_is_asked_for() -> None:
    os.seteuid(NOBODY)
    try:
        (found,) = probes.probe()
        with pytest.raises(Unsupported, match="Operation not permitted") as raised:
            NftablesBackend().open()
    finally:
        os.seteuid(0)
    assert str(found) == "nftables: cannot change nftables: Operation not permitted (EPERM)"
    assert found.remedy == raised.value.hint == "run as root, or with CAP_NET_ADMIN"
