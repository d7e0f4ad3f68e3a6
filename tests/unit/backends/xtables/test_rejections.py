"""What else cannot be where something is rejected."""

import pytest

from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.iptables.layout import LAYOUT
from ebpfproxy.backends.xtables.entries import NAT, Chain, Entry, Key, Rule, RulePosition
from ebpfproxy.backends.xtables.rejections import rule_shape, with_dependents
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


def test_what_leads_to_what_is_refused_is_rejected() -> None:
    rejected = with_dependents({SEP: WHY}, Delta(SERVICE, frozenset()), {}, LAYOUT)
    assert rejected.keys() == SERVICE.keys()
    assert rejected[SEP] is WHY
    assert "KUBE-SEP-A" in rejected[SVC].message


def test_what_it_leads_to_is_not() -> None:
    assert with_dependents({EXT: WHY}, Delta(SERVICE, frozenset()), {}, LAYOUT).keys() == {EXT}


def test_a_chain_that_keeps_its_rules_is_there_to_be_led_to() -> None:
    puts = {key: entry for key, entry in SERVICE.items() if key != EXT}
    assert with_dependents({SEP: WHY}, Delta(puts, frozenset()), {SEP: ()}, LAYOUT).keys() == {SEP}


def test_what_a_refused_chain_still_leads_to_cannot_be_dropped_nor_what_that_leads_to() -> None:
    delta: Delta[Key, Entry] = Delta({EXT: ("-j nowhere",)}, frozenset({SVC, SEP, RULE}))
    assert with_dependents({EXT: WHY}, delta, SERVICE, LAYOUT).keys() == {EXT, SVC, SEP}


def test_where_nothing_is_refused_nothing_is() -> None:
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
def test_rules_are_of_one_sort_where_only_values_differ(one: str, other: str, alike: bool) -> None:
    assert (rule_shape(one) == rule_shape(other)) is alike
