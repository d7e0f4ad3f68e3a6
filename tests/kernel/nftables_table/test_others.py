"""Changes of the tables by other programs, tables of a previous run, and what the machine lacks."""

import os
import re

import pytest

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.nftables import coexistence, probes
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.entries import TABLE
from ebpfproxy.backends.nftables.names import affinity_number, endpoint_name
from ebpfproxy.errors import NotFound, Unsupported
from ebpfproxy.linux.nft import expressions, messages
from ebpfproxy.model.address import Family
from tests.contract.test_backend import plan
from tests.kernel.nftables_table.tables import bring, entries, listed, run_nft
from tests.support.clock import Clock

pytestmark = pytest.mark.kernel

V4, V6 = Family.IPV4, Family.IPV6
NOBODY = 65534


def test_own_changes_and_other_tables_are_not_reported_as_drift(plane: NftablesBackend) -> None:
    bring(plane, entries(plane))
    bring(plane, entries(plane, plan("web", "10.96.0.1")))
    before = plane.generation()
    run_nft("table ip other { chain one { type filter hook input priority 0; }; }; table inet kube-proxy { }")
    assert plane.generation() == plane.generation() == before


@pytest.mark.parametrize(
    "change",
    [
        f"add chain ip {TABLE} foreign",
        f"flush chain ip {TABLE} services",
        f"delete element ip {TABLE} cluster-ips {{ 10.96.0.1 }}",
        f"insert rule ip6 {TABLE} services drop",
        f"delete table ip {TABLE}",
        "flush ruleset",
    ],
)
def test_changes_by_other_programs_are_noticed_and_repaired(plane: NftablesBackend, change: str) -> None:
    wanted = entries(plane, plan("web", "10.96.0.1"))
    bring(plane, wanted)
    before = plane.generation()
    run_nft(change)
    assert plane.generation() != before
    assert plane.read() != wanted
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()
    assert plane.generation() == plane.generation()


def test_a_foreign_change_just_before_an_own_change_is_noticed(plane: NftablesBackend) -> None:
    """The generation that a sync remembers must not be that of a table which was not read."""
    bring(plane, entries(plane))
    run_nft(f"add chain ip {TABLE} foreign")
    wanted = entries(plane, plan("web", "10.96.0.1"))
    plane.apply(diff(entries(plane), wanted))
    before = plane.generation()
    assert plane.generation() != before
    assert not bring(plane, wanted)
    assert plane.read() == wanted


def test_many_changes_of_other_tables_do_not_hide_a_change_of_the_own_table(
    plane: NftablesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(plane, entries(plane))
    before = plane.generation()
    chains = "\n".join(f"add chain ip other chain-{n}" for n in range(20_000))
    run_nft(f"add table ip other\n{chains}")
    run_nft(f"add chain ip {TABLE} foreign")
    assert plane.generation() != before


def test_a_change_of_a_deleted_table_is_an_error(plane: NftablesBackend) -> None:
    wanted = entries(plane, plan("web", "10.96.0.1"))
    bring(plane, wanted)
    run_nft("flush ruleset")
    more = entries(plane, plan("web", "10.96.0.1"), plan("api", "10.96.0.2"))
    with pytest.raises(NotFound, match="cannot change table ip kube-proxy: another program removed it"):
        plane.apply(diff(wanted, more))
    assert not bring(plane, more)
    assert plane.read() == more == listed()


# A previous run


def test_only_the_difference_to_the_tables_of_a_previous_run_is_written(clock: Clock) -> None:
    previous = NftablesBackend(clock=clock)
    previous.open()
    left = entries(previous, plan("web", "10.96.0.1"), plan("gone", "10.96.0.2"))
    bring(previous, left)
    previous.close()
    before = run_nft(f"list table ip {TABLE}")
    plane = NftablesBackend(clock=clock)
    plane.open()
    assert run_nft(f"list table ip {TABLE}") == before, "open() changes nothing"
    wanted = entries(plane, plan("web", "10.96.0.1"), plan("new", "10.96.0.3"))
    delta = diff(plane.read(), wanted)
    assert delta.puts.keys() == wanted.keys() - left.keys()
    assert not plane.apply(delta)
    assert plane.read() == wanted == listed()
    plane.close()
    assert listed() == wanted


def test_a_change_replaces_tables_of_a_previous_run_that_were_not_read(clock: Clock) -> None:
    for plans in ([plan("web", "10.96.0.1", endpoints=2)], [plan("web", "10.96.0.1", endpoints=3)]):
        plane = NftablesBackend(clock=clock)
        plane.open()
        wanted = entries(plane, *plans)
        assert not plane.apply(Delta(wanted, frozenset()))
        plane.close()
        assert listed() == wanted


@pytest.mark.parametrize("of", Family)
def test_the_known_clients_of_kube_proxy_stay_known(plane: NftablesBackend, of: Family) -> None:
    """It has a set for each endpoint, and so had previous versions."""
    ip, address, client, frontend = {
        V4: ("ip", "ipv4_addr", "192.0.2.7", "10.96.0.1"),
        V6: ("ip6", "ipv6_addr", "2001:db8::7", "fd00::1"),
    }[of]
    served = plan("web", frontend, endpoints=2, family=of, affinity=600)
    second = served.endpoints[1]
    name = f"affinity-{endpoint_name(served.name, second.address, second.port)}"
    run_nft(
        f"""
        table {ip} {TABLE} {{
            set {name} {{
                type {address}; size 65535; flags dynamic,timeout; timeout 3h
                elements = {{ {client} timeout 10m expires 100s }}
            }}
        }}
        """
    )
    wanted = entries(plane, served)
    assert not bring(plane, wanted)
    assert plane.read() == wanted == listed()
    listing = run_nft(f"list set {ip} {TABLE} affinity", "-T")
    number = affinity_number(served.name, second.address, second.port)
    assert re.search(rf"{client} \. {number} timeout 600s expires (9[0-9]|100)(\.|s)", listing), listing


# Capabilities of the machine


def test_this_machine_has_everything_that_the_mode_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(coexistence.SKIP, "1")  # so that the kernel's version does not matter
    assert [str(each) for each in probes.probe()] == [
        "nftables for IPv4: present",
        "nftables for IPv6: present",
        "NAT chains besides those of other programs: present",
        f"{coexistence.FEATURE}: present",
        "hashes of addresses: present",
    ]
    assert run_nft("list ruleset") == "", "the probes leave nothing"


def test_a_missing_feature_is_named_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message contains an expression that no kernel has."""
    monkeypatch.setattr(expressions, "masquerade", lambda: expressions._expression("nonsense"))
    found = probes.probe()
    assert [each.needed for each in found] == [True, True]
    assert str(found[0]) == "nftables for IPv4: this kernel lacks masquerading (ENOENT)"
    assert found[0].remedy == "modprobe -a nft_masq"


def test_a_kernel_without_hashes_serves_with_a_limitation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "hashed", lambda *_: expressions._expression("nonsense"))
    *others, found = probes.probe()
    assert all(each.present for each in others[:3])
    assert (found.present, found.needed, found.modules) == (False, False, ("nft_hash",))
    assert (
        str(found)
        == "hashes of addresses: Services with lb-algorithm source-hash or maglev are rejected (ENOENT)"
    )


@pytest.mark.parametrize(
    "used",
    [{Family.IPV4}, {Family.IPV6}, set(Family), set()],
    # Not ids=str: two workers of one run would order the set, and so name the test, differently.
    ids=["ipv4", "ipv6", "both", "neither"],
)
def test_a_missing_family_is_preferred_only_if_the_node_uses_it(
    monkeypatch: pytest.MonkeyPatch, used: set[Family]
) -> None:
    """Its table is rejected, as by a kernel without CONFIG_NF_TABLES_IPV6."""
    monkeypatch.setitem(messages._FAMILIES, "ip6", 200)  # no NFPROTO_* of any kernel
    v4, v6, *_ = probes.probe(used)
    assert v4.present
    assert (v6.present, v6.needed, v6.preferred) == (False, False, Family.IPV6 in used)
    assert v4.preferred is (Family.IPV4 in used)
    assert "CONFIG_NF_TABLES_IPV6" in v6.remedy


def test_a_nat_chain_that_is_never_called_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Linux 4.18. In this test, since the chain has no rule."""
    complete = coexistence._operations
    monkeypatch.setattr(coexistence, "_operations", lambda port: complete(port)[:-1])
    *families, nat, _, _ = probes.probe()
    assert all(each.present for each in families)
    assert (nat.needed, nat.present) == (True, False)


def test_a_missing_capability_is_reported_with_a_hint() -> None:
    os.seteuid(NOBODY)
    try:
        (found,) = probes.probe()
        with pytest.raises(Unsupported, match="Operation not permitted") as raised:
            NftablesBackend().open()
    finally:
        os.seteuid(0)
    assert str(found) == "nftables: cannot change nftables: Operation not permitted (EPERM)"
    assert found.remedy == raised.value.hint == "run as root, or with CAP_NET_ADMIN"
