"""Names of algorithms and rules for weights."""

import pytest

from ebpfproxy.model.address import parse_address
from ebpfproxy.model.balancing import Algorithm, parse_algorithm, parse_weights


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("round-robin", Algorithm.ROUND_ROBIN),
        ("wrr", Algorithm.ROUND_ROBIN),
        ("wlc", Algorithm.LEAST_CONNECTIONS),
        ("sh", Algorithm.SOURCE_HASH),
        ("mh", Algorithm.MAGLEV),
    ],
)
def test_algorithms_have_the_names_of_ipvs_as_synonyms(text: str, expected: Algorithm) -> None:
    assert parse_algorithm(text) is expected


@pytest.mark.parametrize("text", ["", "Random", "lblc", "maglev "])
def test_other_names_are_rejected_with_the_valid_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not one of random, round-robin, .*, mh"):
        parse_algorithm(text)


def test_a_rule_matches_a_node_an_address_or_a_network() -> None:
    node, address, network = parse_weights("node:worker-1=3, 10.244.1.7=2,10.244.0.0/16=0")
    inside, outside = parse_address("10.244.1.7"), parse_address("10.245.0.1")
    assert [each.weight for each in (node, address, network)] == [3, 2, 0]
    assert node.matches(outside, "worker-1")
    assert not node.matches(inside, "worker-2")
    assert address.matches(inside, "")
    assert not address.matches(parse_address("10.244.1.8"), "")
    assert network.matches(inside, "worker-1")
    assert not network.matches(outside, "worker-1")


def test_a_rule_may_have_an_ipv6_address() -> None:
    (rule,) = parse_weights("fd00:10:244::/64=100")
    assert rule.matches(parse_address("fd00:10:244::7"), "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("node:a", "does not end with = and a weight"),
        ("node:a=101", "from 0 to 100"),
        ("node:a=-1", "from 0 to 100"),
        ("node:a=¹", "from 0 to 100"),
        ("node:=1", "names no node"),
        ("worker-1=1", "neither node:NAME nor an IP address or CIDR"),
        ("10.0.0.0/33=1", "neither node:NAME nor an IP address or CIDR"),
    ],
)
def test_an_invalid_rule_is_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_weights(f"10.0.0.1=1,{text}")
