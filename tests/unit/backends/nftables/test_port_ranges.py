"""Sets of addresses: the smallest number of equivalent ranges, and their text."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.nftables.port_ranges import (
    Range,
    is_everything,
    merged,
    network_range,
    range_text,
)
from ebpfproxy.model.address import Family, parse_network
from tests.support.nft_text import operand, parse_range

NUMBERS = st.integers(0, 60)
RANGES = st.lists(st.tuples(NUMBERS, NUMBERS).map(lambda pair: Range(min(pair), max(pair))), max_size=8)


def addresses(ranges: list[Range]) -> set[int]:
    return {number for first, last in ranges for number in range(first, last + 1)}


@given(RANGES)
def test_merged_ranges_hold_the_same_addresses_and_neither_overlap_nor_touch(ranges: list[Range]) -> None:
    found = merged(ranges)
    assert addresses(found) == addresses(ranges)
    assert all(one.last + 1 < other.first for one, other in itertools.pairwise(found))


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.1",
        "10.0.0.0/8",
        "0.0.0.0/0",
        "10.0.0.1-10.0.0.2",
        "64.0.0.0-255.255.255.255",
        "fd00::1",
        "fd00::/8",
        "::/0",
        "fd00::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    ],
)
def test_the_text_of_a_range_is_read_back_as_that_range(text: str) -> None:
    assert range_text(parse_range(text)) == text


@pytest.mark.parametrize("text", ["", "10.0.0.0/33", "@set", "10.0.0.1-", "a-b"])
def test_an_invalid_range_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        parse_range(text)


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        (["192.0.2.5/32"], "192.0.2.5"),
        (["192.0.2.0/25", "192.0.2.128/25"], "192.0.2.0/24"),
        (["10.1.0.0/16", "10.0.0.0/8"], "10.0.0.0/8"),
        (["203.0.113.5/32", "10.0.0.0/8"], "{ 10.0.0.0/8, 203.0.113.5 }"),
        (["2001:db8::/32", "fd00::1/128"], "{ 2001:db8::/32, fd00::1 }"),
    ],
)
def test_an_operand_is_a_set_only_if_there_are_several_ranges(networks: list[str], expected: str) -> None:
    assert operand(merged(network_range(parse_network(text)) for text in networks)) == expected


@pytest.mark.parametrize(
    ("networks", "of", "everything"),
    [
        (["0.0.0.0/0"], Family.IPV4, True),
        (["0.0.0.0/1", "128.0.0.0/1"], Family.IPV4, True),
        (["0.0.0.0/1"], Family.IPV4, False),
        (["::/0"], Family.IPV6, True),
        ([], Family.IPV6, False),
    ],
)
def test_ranges_that_cover_a_family_are_recognized(networks: list[str], of: Family, everything: bool) -> None:
    assert is_everything(merged(network_range(parse_network(text)) for text in networks), of) is everything
