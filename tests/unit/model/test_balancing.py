"""Names of algorithms and rules for weights."""

import pytest

from ebpfproxy.model.address import parse_network
from ebpfproxy.model.balancing import MAX_RULES, Algorithm, parse_algorithm, parse_weights


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


def test_a_rule_has_a_node_an_address_or_a_network() -> None:
    node, address, network = parse_weights("node:worker-1=3, 10.244.1.7=2,fd00::/64=0")
    assert (node.node, node.network, node.weight) == ("worker-1", None, 3)
    assert (address.node, address.network, address.weight) == ("", parse_network("10.244.1.7/32"), 2)
    assert (network.node, network.network, network.weight) == ("", parse_network("fd00::/64"), 0)


def test_more_rules_than_the_maximum_are_rejected() -> None:
    rules = [f"10.{n >> 8}.{n & 255}.1=1" for n in range(MAX_RULES)]
    assert len(parse_weights(",".join(rules))) == MAX_RULES
    for text in (",".join([*rules, "node:a=1"]), "," * 250_000 + "node:a=1"):
        with pytest.raises(ValueError, match=f"more than {MAX_RULES} rules"):
            parse_weights(text)


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
