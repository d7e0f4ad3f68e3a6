"""Rules are text of nft, and are recognized by their digests in what the kernel reports."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.linux.nft import messages, replies
from ebpfproxy.linux.nft.encoding import name, nested
from ebpfproxy.linux.nft.messages import Kind, Operation, Table
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.rule_expressions import SetNames, convert
from ebpfproxy.linux.nft.sets import LIST_KEY, SetElement

TABLE = Table("ip", "kube-proxy")

CONSTANT = "numgen random mod 1 offset"
RULES = [
    "ip saddr != 10.0.0.1-10.0.0.9 drop",
    "ip saddr 10.0.0.1-10.0.0.9 drop",
    "ip saddr 10.0.0.0/8 ip daddr 10.64.0.0/10 accept",
    'ip daddr @ips reject comment "a: b"',
    "ip saddr != { 10.0.0.0/8, 1.2.3.4 } drop",
    'iifname "eth*" jump a',
    'iifname != "eth0" drop',
    "ct state new return",
    "counter reject",
    "ct status dnat fib daddr type != local drop",
    "meta mark & 0x00004000 != 0x00000000 goto a/b",
    "meta mark set meta mark | 0x00000001 masquerade fully-random",
    "meta mark set meta mark ^ 0x00000001",
    "ip daddr . meta l4proto . th dport vmap @service-ips",
    "@nh,120,8 . @nh,152,8 @equal-bytes drop",
    "meta l4proto . ip daddr . th dport @relayed tcp dport set tcp dport ^ 0x8000",
    "meta l4proto . ip saddr . th sport ^ 0x8000 @relayed reject with tcp reset",
    "meta l4proto 1 icmp type 3 @th,136,8 . @th,160,32 . @th,224,16 @relayed "
    "@th,224,16 set @th,224,16 ^ 0x8000 checksum 2",
    "ct original ip daddr @ips flow add @services",
    "ct original ip daddr . meta l4proto . ct original proto-dst @ips flow add @services",
    "meta l4proto tcp numgen random mod 3 0 dnat to 10.0.0.1:80",
    "numgen random mod 4 < 3 drop",
    "numgen inc mod 4 0 drop",
    "jhash ip saddr mod 4 seed 0x65627066 < 3 drop",
    "jhash ip saddr . th sport mod 4 seed 0x65627066 < 3 drop",
    f"ip saddr . {CONSTANT} 7 @affinity update @affinity {{ ip saddr . {CONSTANT} 7 timeout 60s }}",
    f"dnat ip to {CONSTANT} 1 . {CONSTANT} 2 . numgen random mod 3 map @endpoints-01",
    f"dnat ip to {CONSTANT} 0 . {CONSTANT} 0 . jhash ip saddr mod 3 seed 0x65627066 map @endpoints-01",
    f"dnat ip to {CONSTANT} 0 . {CONSTANT} 0 . jhash ip saddr . th sport mod 251 seed 0x65627066 "
    "map @endpoints-01",
]


def reported(operation: Operation) -> replies.ListedRule:
    return replies.read_rule(bytes(4) + operation.body)


def written(rule: Rule) -> Operation:
    *before, last = messages.add_rule(TABLE, "chain", rule, SetNames())
    assert [each.kind for each in before] == [Kind.NEW_SET, Kind.NEW_ELEMENT] * rule.text.count("!= {")
    return last


@pytest.mark.parametrize("text", RULES)
def test_a_rule_is_recognized_when_it_is_read(text: str) -> None:
    assert reported(written(Rule(text))) == replies.ListedRule("chain", Rule(text))


def test_all_rules_differ() -> None:
    assert len(set(map(Rule, RULES))) == len({Rule(text).digest for text in RULES}) == len(RULES)
    assert len({convert(text, "ip", SetNames()).expressions for text in RULES}) == len(RULES)


def test_a_rule_names_its_target_and_the_number_of_its_clients() -> None:
    assert Rule('ip saddr 10.0.0.0/8 goto local-A/b comment "jump away"').target == "local-A/b"
    assert Rule('drop comment "jump away"').target == ""
    remember, lookup = f"ip saddr . {CONSTANT} 7", f"ip saddr . {CONSTANT} 8 @affinity"
    assert Rule(f"{lookup} update @affinity {{ {remember} timeout 60s }} drop").remembers == 7
    assert Rule(f"{lookup} drop").remembers is None


def test_a_rule_without_a_digest_is_one_of_another_program() -> None:
    """nft replaces a rule together with its userdata."""
    rule = Rule("ct state new jump services")
    expressions = convert(rule.text, "ip", SetNames()).expressions
    body = name(1, "kube-proxy") + name(2, "chain") + nested(4, expressions)
    (found,) = [replies.read_rule(bytes(4) + body).rule]
    assert (found.digest, found.target) == (b"", "services")
    assert found != rule


def test_a_rule_whose_chain_was_renamed_is_recognized_as_changed() -> None:
    """Its digest stays the same, but the kernel reports the new name."""
    rule = Rule("ct state new jump services")
    operation = written(rule)
    renamed = operation._replace(body=operation.body.replace(b"services\0", b"renamed!\0"))
    found = reported(renamed).rule
    assert found.digest == rule.digest
    assert found != rule


@pytest.mark.parametrize(
    "text",
    [
        'iifname "more-than-fifteen" drop',
        "ip saddr fd00::1 drop",
        "meta l4proto tcpp drop",
        "ip saddr what is this",
        "ip saddr",
        "ip saddr . th dport 80",
        "ip saddr != { 10.0.0.1",
        "dnat to 10.0.0.1",
        "dnat ip6 to numgen random mod 1 map @m",
        "numgen often mod 2 0",
        "jump",
        "queue",
        "update affinity { ip saddr timeout 1s }",
        "tcp dport set udp dport ^ 0x8000",
        "reject with icmp",
        "flow remove @services",
        "flow add services",
    ],
)
def test_a_rule_with_an_invalid_text_names_it(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        convert(text, "ip", SetNames())


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
