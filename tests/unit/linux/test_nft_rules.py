"""Rules have the text of nft, and are recognized by their digests in what the kernel reports."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.linux.nft import messages, replies
from ebpfproxy.linux.nft.draws import Draw
from ebpfproxy.linux.nft.encoding import encode_all, name, nested
from ebpfproxy.linux.nft.messages import Kind, Operation, SetNames, Table
from ebpfproxy.linux.nft.rewriting import ExchangePort, HasPort, IcmpError, end, source_in_icmp_error
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.sets import SetElement
from ebpfproxy.linux.nft.statements import (
    DROP,
    LIST_KEY,
    RETURN,
    ChangeMark,
    Dnat,
    DnatToOne,
    Find,
    Marked,
    Masquerade,
    Match,
    Outside,
    Reject,
    Remember,
    Remembered,
    SameByte,
    Share,
    goto,
    jump,
)

TABLE = Table("ip", "kube-proxy")
ADDRESS = bytes((10, 0, 0, 1))

RULES = [
    (Rule(Match("ip saddr", "10.0.0.1-10.0.0.9", True), DROP), "ip saddr != 10.0.0.1-10.0.0.9 drop"),
    (Rule(Match("ip daddr", "@ips"), Reject("ip"), comment="a: b"), 'ip daddr @ips reject comment "a: b"'),
    (Rule(Outside("ip saddr", ("10.0.0.0/8", "1.2.3.4")), DROP), "ip saddr != { 10.0.0.0/8, 1.2.3.4 } drop"),
    (Rule(Match("iifname", '"eth*"'), jump("a")), 'iifname "eth*" jump a'),
    (Rule(Match("ct state", "new"), RETURN), "ct state new return"),
    (Rule(Marked(1 << 14), goto("a/b")), "meta mark & 0x00004000 != 0x00000000 goto a/b"),
    (Rule(ChangeMark(1), Masquerade()), "meta mark set meta mark | 0x00000001 masquerade fully-random"),
    (Rule(ChangeMark(1, inverts=True)), "meta mark set meta mark ^ 0x00000001"),
    (
        Rule(Find(("ip daddr", "meta l4proto", "th dport"), "service-ips", verdicts=True)),
        "ip daddr . meta l4proto . th dport vmap @service-ips",
    ),
    (Rule(SameByte(15, 19, "equal-bytes"), DROP), "@nh,120,8 . @nh,152,8 @equal-bytes drop"),
    (
        Rule(HasPort(end("ip", "daddr"), "relayed"), ExchangePort(end("ip", "daddr"), 16)),
        "meta l4proto . ip daddr . th dport @relayed @th,16,16 set @th,16,16 ^ 0x8000 checksum at 16",
    ),
    (
        Rule(HasPort(end("ip6", "saddr"), "relayed", other=True), Reject("ip6", reset=True)),
        "meta l4proto . ip6 saddr . th sport ^ 0x8000 @relayed reject with tcp reset",
    ),
    (
        Rule(IcmpError("ip"), HasPort(source_in_icmp_error("ip"), "relayed"), DROP),
        "icmp type destination-unreachable source in icmp error @relayed drop",
    ),
    (Rule(Share("ip", 3), Dnat(ADDRESS, 80)), "numgen random mod 3 0 dnat to 10.0.0.1:80"),
    (Rule(Share("ip", 4, 3), DROP), "numgen random mod 4 < 3 drop"),
    (Rule(Share("ip6", 4, 1, Draw.IN_TURN), DROP), "numgen inc mod 4 0 drop"),
    (Rule(Share("ip6", 4, 3, Draw.BY_SOURCE), DROP), "jhash ip6 saddr mod 4 seed 0x65627066 < 3 drop"),
    (Rule(Dnat(bytes.fromhex("fd") + bytes(14) + b"\1", 80)), "dnat to [fd00::1]:80"),
    (
        Rule(Remembered("ip", "affinity", 7), Remember("ip", "affinity", 7, 60)),
        "ip saddr . numgen random mod 1 offset 7 @affinity "
        "update @affinity { ip saddr . numgen random mod 1 offset 7 timeout 60s }",
    ),
    (
        Rule(DnatToOne("ip", "endpoints-01", (1).to_bytes(4, "little") + (2).to_bytes(4, "little"), 3)),
        "dnat ip to numgen random mod 1 offset 1 . numgen random mod 1 offset 2 . numgen random mod 3 "
        "map @endpoints-01",
    ),
    (
        Rule(DnatToOne("ip6", "endpoints-01", bytes(8), 3, Draw.BY_SOURCE)),
        "dnat ip6 to numgen random mod 1 offset 0 . numgen random mod 1 offset 0 . "
        "jhash ip6 saddr mod 3 seed 0x65627066 map @endpoints-01",
    ),
    (
        Rule(DnatToOne("ip6", "endpoints-01", bytes(8), 251, Draw.BY_FLOW)),
        "dnat ip6 to numgen random mod 1 offset 0 . numgen random mod 1 offset 0 . "
        "jhash ip6 saddr . th sport mod 251 seed 0x65627066 map @endpoints-01",
    ),
    (
        Rule(Share("ip", 4, 3, Draw.BY_FLOW), DROP),
        "jhash ip saddr . th sport mod 4 seed 0x65627066 < 3 drop",
    ),
]  # fmt: skip


def reported(operation: Operation) -> replies.ListedRule:
    return replies.read_rule(bytes(4) + operation.body)


def written(rule: Rule) -> Operation:
    *before, last = messages.add_rule(TABLE, "chain", rule.encoded(), SetNames())
    assert [each.kind for each in before] == [Kind.NEW_SET, Kind.NEW_ELEMENT] * len(rule.sets())
    return last


@pytest.mark.parametrize(("rule", "text"), RULES, ids=[text for _, text in RULES])
def test_a_rule_has_the_text_of_nft(rule: Rule, text: str) -> None:
    assert str(rule) == text


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=str)
def test_a_rule_is_recognized_when_it_is_read(rule: Rule) -> None:
    assert reported(written(rule)) == replies.ListedRule("chain", rule)


def test_all_rules_differ() -> None:
    rules = {rule for rule, _ in RULES}
    assert len(rules) == len({rule.digest for rule in rules}) == len(RULES)


@pytest.mark.parametrize(
    "other",
    [
        Rule(Outside("ip saddr", ("10.0.0.0/8", "192.0.2.2")), DROP),
        Rule(Outside("ip saddr", ("10.0.0.0/8", "192.0.2.1")), DROP, comment="x"),
        Rule(Outside("ip saddr", ("10.0.0.0/8", "192.0.2.1"))),
    ],
    ids=str,
)
def test_a_difference_in_a_set_or_comment_is_a_difference(other: Rule) -> None:
    assert other != Rule(Outside("ip saddr", ("10.0.0.0/8", "192.0.2.1")), DROP)


def test_a_rule_without_a_digest_is_one_of_another_program() -> None:
    """nft replaces a rule together with its userdata."""
    rule = Rule(Match("ct state", "new"), jump("services"))
    body = name(1, "kube-proxy") + name(2, "chain") + nested(4, encode_all(rule.expressions()))
    (found,) = [replies.read_rule(bytes(4) + body).rule]
    assert (found.digest, found.target) == (b"", "services")
    assert found != rule


def test_a_rule_whose_chain_was_renamed_is_recognized_as_changed() -> None:
    """Its digest stays the same, but the kernel reports the new name."""
    rule = Rule(Match("ct state", "new"), jump("services"))
    operation = written(rule)
    renamed = operation._replace(body=operation.body.replace(b"services\0", b"renamed!\0"))
    found = reported(renamed).rule
    assert found.digest == rule.digest
    assert found != rule


@pytest.mark.parametrize(
    "match",
    [Match("iifname", '"more-than-fifteen"'), Match("ip saddr", "fd00::1"), Match("meta l4proto", "tcpp")],
    ids=str,
)
def test_a_rule_with_an_invalid_value_names_it(match: Match) -> None:
    rule = Rule(match, DROP)
    assert rule != Rule(DROP)
    assert rule == Rule(match, DROP)
    with pytest.raises(ValueError, match=re.escape(str(match))):
        rule.encoded()


@given(st.binary(max_size=80))
def test_reading_junk_raises_nothing(data: bytes) -> None:
    replies.read_rule(bytes(4) + data)


@pytest.mark.parametrize("size", [8, 20])
def test_endpoints_are_read_as_they_were_written(size: int) -> None:
    endpoints = [(place, bytes((place % 256,)) * size) for place in range(1500)]
    operations = list(messages.add_listed(TABLE, "endpoints-00", b"identity", endpoints))
    assert len(operations) == 2
    found = [each for one in operations for each in replies.read_listed(bytes(4) + one.body, size - 4)]
    assert found == [(b"identity", place, endpoint) for place, endpoint in endpoints]


def test_endpoints_with_comments_of_another_program_are_read() -> None:
    key = LIST_KEY.pack(b"identity", 1)
    plain, commented = (SetElement(key, value=b"12345678", comment=comment) for comment in ("", "a comment"))
    for elements in ([commented], [plain, commented], [commented, plain]):
        (operation,) = messages.add_elements(TABLE, "endpoints-00", elements)
        found = list(replies.read_listed(bytes(4) + operation.body, 4))
        assert found == [(b"identity", 1, b"12345678")] * len(elements)
