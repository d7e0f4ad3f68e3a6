"""Which entries cannot be written because of other rejected ones."""

import pytest

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.iptables.chains import LAYOUT
from ebpfproxy.backends.iptables.entries import NAT, Chain, Entry, Key, Rule, RulePosition
from ebpfproxy.backends.iptables.tables import rule_shape, with_dependents
from ebpfproxy.errors import Rejected
from ebpfproxy.model.address import Family

V4 = Family.IPV4
SEP, SVC, EXT = (Chain(V4, NAT, f"KUBE-{kind}-A") for kind in ("SEP", "SVC", "EXT"))
RULE = Rule(V4, NAT, "KUBE-SERVICES", "-d 10.96.0.1/32 -j KUBE-SVC-A")
SERVICE: dict[Key, Entry] = {
    SEP: ("-j DNAT --to-destination 10.1.0.1:80",),
    SVC: ("-j KUBE-SEP-A",),
    EXT: ("-j KUBE-SVC-A",),
    RULE: RulePosition.ANYWHERE,
}
WHY = Rejected("no")


def test_entries_that_jump_to_a_rejected_chain_are_rejected() -> None:
    rejected = with_dependents({SEP: WHY}, Delta(SERVICE, frozenset()), {}, LAYOUT)
    assert rejected.keys() == SERVICE.keys()
    assert rejected[SEP] is WHY
    assert "KUBE-SEP-A" in rejected[SVC].message


def test_chains_that_a_rejected_chain_jumps_to_are_not_rejected() -> None:
    assert with_dependents({EXT: WHY}, Delta(SERVICE, frozenset()), {}, LAYOUT).keys() == {EXT}


def test_a_rejected_chain_that_keeps_its_old_rules_remains_a_valid_target() -> None:
    puts = {key: entry for key, entry in SERVICE.items() if key != EXT}
    assert with_dependents({SEP: WHY}, Delta(puts, frozenset()), {SEP: ()}, LAYOUT).keys() == {SEP}


def test_chains_reachable_from_a_rejected_chain_cannot_be_dropped() -> None:
    delta: Delta[Key, Entry] = Delta({EXT: ("-j nowhere",)}, frozenset({SVC, SEP, RULE}))
    assert with_dependents({EXT: WHY}, delta, SERVICE, LAYOUT).keys() == {EXT, SVC, SEP}


def test_without_rejections_there_are_no_dependents() -> None:
    assert with_dependents({}, Delta(SERVICE, frozenset()), {}, LAYOUT) == {}


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("-s 10.1.0.1/32 -j KUBE-MARK-MASQ", "-s 10.1.0.2/32 -j KUBE-SVC-A", True),
        ("-p tcp -m tcp --dport 80 -j DROP", "-p tcp -m tcp --dport 81 -j DROP", True),
        ("-p tcp -m tcp --dport 80 -j DROP", "-p sctp -m sctp --dport 80 -j DROP", False),
        ("-m mark --mark 0x1/0x1 -j RETURN", "-m mark ! --mark 0x1/0x1 -j RETURN", False),
        ("-j MASQUERADE", "-j MASQUERADE --random-fully", False),
        ('-m comment --comment "-m sctp" -j DROP', "-m comment --comment x -j DROP", True),
        (r'-m comment --comment "a \" -m sctp" -j DROP', "-m comment --comment x -j DROP", True),
    ],
)
def test_rules_that_differ_only_in_values_have_one_shape(one: str, other: str, alike: bool) -> None:
    assert (rule_shape(one) == rule_shape(other)) is alike
