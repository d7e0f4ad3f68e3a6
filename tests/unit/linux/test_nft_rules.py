"""Rules are compiled, encoded, decoded and decompiled to the same text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, nft_family
from ebpfproxy.linux.nft import messages, replies
from ebpfproxy.linux.nft.compile import compile_rule, parse_verdict
from ebpfproxy.linux.nft.decompile import rule_text, verdict_text
from ebpfproxy.linux.nft.encoding import decode_all, encode_all, name, nested, u32
from ebpfproxy.linux.nft.expressions import (
    Bitwise,
    Compare,
    Ct,
    Load,
    Lookup,
    Meta,
    Nat,
    Other,
    Payload,
    Verdict,
)
from ebpfproxy.linux.nft.messages import Kind, SetNames, Table
from ebpfproxy.linux.nft.rule import Rule
from tests.golden.nftables_text import entries_of
from tests.golden.situation import load, situations

TABLE = Table("ip", "kube-proxy")

WORDS = [
    ("ip", "ip saddr != 10.0.0.1-10.0.0.9 drop"),
    ("ip", "ip saddr 10.0.0.1-10.0.0.9 accept"),
    ("ip", "ip saddr 10.128.0.0/9 jump mark-for-masquerade"),
    ("ip", "ip saddr 10.0.0.0/8 goto somewhere"),
    ("ip", "ip saddr != 0.0.0.0/0 drop"),
    ("ip", "ip saddr != { 0.0.0.0/8, 255.255.255.255 } drop"),
    ("ip", "ct state != new return"),
    ("ip", "ct state established accept"),
    ("ip", "ct status dnat accept"),
    ("ip", "ip saddr . ip daddr . meta l4proto . th dport @connections drop"),
    ("ip", "ip saddr . ip daddr != @connections drop"),
    ("ip", "meta l4proto sctp dnat ip to numgen random mod 2 map { 0 : 10.0.0.1 . 80, 1 : 10.0.0.2 . 81 }"),
    ("ip", "fib daddr type != local drop"),
    ("ip", 'iifname "eth*" drop'),
    ("ip", 'iifname != "a-name-of-15-ch" drop'),
    ("ip", "meta mark & 0x80000000 != 0x00000000 return"),
    ("ip", "meta mark set meta mark ^ 0x80000000"),
    ("ip", "meta l4proto 47 drop"),
    ("ip", 'ip daddr @cluster-ips reject comment "two words: and more"'),
    ("ip", "masquerade"),
    ("ip6", "ip6 saddr != fd00::/40 drop"),
    ("ip6", "ip6 saddr != fd00::/41 drop"),
    ("ip6", "ip6 daddr . meta l4proto . th dport vmap @service-ips"),
    ("ip6", "meta l4proto udp dnat to [fd00::1]:53"),
    ("ip6", "meta l4proto udp dnat ip6 to numgen random mod 2 map { 0 : fd00::1 . 53, 1 : fd00::2 . 53 }"),
    ("ip6", "ct status dnat ip6 saddr . ip6 daddr @connections masquerade"),
    ("ip6", "ip6 saddr != { ::/8, ffff::/16 } drop"),
    ("ip6", "update @clients { ip6 saddr timeout 10800s }"),
    ("ip6", "reject"),
]


def told(text: str, family: str) -> Rule:
    """The rule in the kernel's reply, with its sets by their names."""
    names = SetNames()
    compiled = compile_rule(text, family)
    *before, last = messages.add_rule(Table(family, "t"), "c", compiled, names)
    kinds = [each.kind for each in before]
    assert kinds == [Kind.NEW_SET, Kind.NEW_ELEMENT] * len(compiled.sets)
    own = {names.name(number): each for number, each in enumerate(compiled.sets, 1)}
    return replies.read_rule(bytes(4) + last.body, own.get)


@pytest.mark.parametrize(("family", "text"), WORDS)
def test_a_rule_is_decompiled_to_the_same_text(family: str, text: str) -> None:
    assert rule_text(told(text, family), family) == text


@pytest.mark.parametrize("case", situations())
def test_all_rules_of_a_golden_case_are_decompiled_to_the_same_text(case: str) -> None:
    for key, entry in entries_of(load(case)).items():
        if isinstance(key, Chain) and isinstance(entry, ChainEntry):
            family = nft_family(key.family)
            assert tuple(rule_text(told(text, family), family) for text in entry.rules) == entry.rules


@pytest.mark.parametrize(
    "text",
    [
        "",
        "what is this",
        "ip saddr",
        "ip saddr drop",
        "ip saddr fd00::1 drop",
        "ip saddr 10.0.0.0/33 drop",
        "tcp dport 80 drop",
        "goto",
        "numgen random mod 2 vmap { 0 : goto a",
        "numgen inc mod 2 vmap { 0 : goto a }",
        "meta l4proto tcp dnat to 10.0.0.1",
        "meta l4proto tcp dnat ip6 to numgen random mod 1 map { 0 : fd00::1 . 80 }",
        "meta l4proto tcp dnat ip to numgen random mod 1 map { 0 : 10.0.0.1 }",
        "meta l4proto tcp dnat ip to numgen random mod 1 map @named",
        "ip saddr . ip daddr drop",
        "meta mark set 1",
        'iifname "more-than-fifteen" drop',
        "counter drop",
    ],
)
def test_a_rule_with_unsupported_words_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="cannot compile the rule"):
        compile_rule(text, "ip")


@given(st.lists(st.sampled_from(" ".join(text for _, text in WORDS).split(" ")), max_size=9))
def test_words_in_any_order_are_a_rule_or_a_value_error(words: list[str]) -> None:
    text = " ".join(words)
    try:
        rule = compile_rule(text, "ip")
    except ValueError:
        return
    assert isinstance(rule_text(rule, "ip"), str)


@pytest.mark.parametrize(
    "expressions",
    [
        (Other("counter", b""), Verdict(0)),
        (Payload(0, 1, 12, 4), Verdict(0)),  # looked at by nobody
        (Payload(0, 2, 0, 2), Compare(0, 0, b"\0\1")),  # the source's port
        (Meta(0, 3), Bitwise(0, 0, b"\1\0\0\0", b"\2\0\0\0"), Compare(0, 0, bytes(4))),
        (Meta(0, 16), Compare(0, 4, b"\6")),  # greater than
    ],
)
def test_a_rule_that_ebpfproxy_never_writes_is_shown_as_other(expressions: tuple[Any, ...]) -> None:
    text = rule_text(Rule(expressions), "ip")
    assert text.startswith("other: ")
    with pytest.raises(ValueError, match="cannot compile the rule"):
        compile_rule(text, "ip")


CHOICE = compile_rule("dnat ip to numgen random mod 2 map { 0 : 10.0.0.1 . 80, 1 : 10.0.0.2 . 80 }", "ip")
NUMBER, CHOSEN, TRANSLATION = CHOICE.expressions
assert isinstance(CHOSEN, Lookup)


@pytest.mark.parametrize(
    "expressions",
    [
        (NUMBER, CHOSEN, Verdict(0)),  # looked at by nobody
        (NUMBER, CHOSEN, Nat(1, 2, 0, 2)),  # a port of which nobody says anything
        (NUMBER, CHOSEN, Nat(1, 2, 0, 0)),
        (NUMBER, CHOSEN, Load(0, b"\x0a\0\0\1"), TRANSLATION),
        (NUMBER, CHOSEN, Payload(0, 1, 12, 4), Lookup("clients", 0), TRANSLATION),
        (NUMBER, CHOSEN, NUMBER, CHOSEN, TRANSLATION),
        (Meta(0, 16), CHOSEN, TRANSLATION),  # chosen by something else
        (NUMBER, CHOSEN._replace(target=4), TRANSLATION),
    ],
)
def test_a_destination_that_is_selected_in_another_way_is_shown_as_other(
    expressions: tuple[Any, ...],
) -> None:
    assert rule_text(CHOICE, "ip").startswith("dnat ip to numgen")
    assert rule_text(CHOICE._replace(expressions=expressions), "ip").startswith("other: ")


def test_an_expression_with_unknown_attributes_is_decoded_as_other() -> None:
    """ct original saddr: without its direction it would be another expression."""
    known = encode_all([Ct(0, 0)])
    assert decode_all(known) == (Ct(0, 0),)
    register, key, direction = u32(1, 1), u32(2, 0), u32(3, 0)
    more = nested(1, name(1, "ct"), nested(2, register, key, direction))
    (found,) = decode_all(more)
    assert isinstance(found, Other)


@given(st.binary(max_size=80))
def test_decoding_junk_raises_nothing(data: bytes) -> None:
    rule_text(Rule(decode_all(data)), "ip")


@pytest.mark.parametrize("text", ["drop", "accept", "return", "jump a", "goto service-X/y"])
def test_a_verdict_is_converted_to_the_same_text(text: str) -> None:
    assert verdict_text(parse_verdict(text)) == text


@pytest.mark.parametrize("text", ["", "goto", "drop it", "goto a b", "queue"])
def test_unsupported_words_are_not_a_verdict(text: str) -> None:
    with pytest.raises(ValueError):
        parse_verdict(text)
