"""Declarations and elements of sets and maps, as text and in the kernel's encoding."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.linux.nft import messages, replies
from ebpfproxy.linux.nft.encoding import Code, Verdict
from ebpfproxy.linux.nft.messages import Table
from ebpfproxy.linux.nft.sets import (
    Declaration,
    SetElement,
    declaration_text,
    interval_elements,
    intervals,
    parse_declaration,
    parse_verdict,
    verdict_text,
)
from ebpfproxy.linux.nft.types import (
    DEVICE,
    IPV4,
    IPV6,
    MARK,
    PORT,
    PROTOCOL,
    Interval,
    interval_text,
    key_number,
    key_of_number,
    key_text,
    parse_interval,
    parse_key,
)

TABLE = Table("ip", "kube-proxy")

DECLARATIONS = [
    "type ipv4_addr;",
    "type ipv6_addr . inet_proto . inet_service : verdict;",
    "type inet_proto . inet_service : verdict;",
    "type ipv4_addr; size 65535; flags dynamic,timeout;",
    "type ipv6_addr; flags interval;",
    "type mark . mark . mark : ipv4_addr . inet_service;",
]


@pytest.mark.parametrize("text", DECLARATIONS)
def test_a_declaration_is_converted_to_the_same_text(text: str) -> None:
    message = messages.add_set(TABLE, "name", parse_declaration(text), 7)
    told = replies.read_set(bytes(4) + message.body)
    assert told.declaration
    assert declaration_text(told.declaration) == text
    assert (told.name, told.is_anonymous, told.is_dynamic) == ("name", False, "dynamic" in text)


@pytest.mark.parametrize(
    "text", ["", "type;", "type ether_addr;", "type ipv4_addr : ether_addr;", "type ipv4_addr; timeout 3h;"]
)
def test_an_unsupported_declaration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="the declaration"):
        parse_declaration(text)


def test_a_key_of_several_parts_is_padded() -> None:
    key = (IPV4, PROTOCOL, PORT)
    raw = parse_key(key, "10.96.0.10 . udp . 53")
    assert raw == bytes((10, 96, 0, 10, 17, 0, 0, 0, 0, 53, 0, 0))
    assert key_text(key, raw) == "10.96.0.10 . udp . 53"
    assert key_of_number(key_number(key)) == key


@pytest.mark.parametrize(
    "text", ["10.0.0.1", "10.0.0.1 . udp", "10.0.0.1 . udp . 65536", "fd00::1 . udp . 1"]
)
def test_a_key_with_other_parts_is_rejected(text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parse_key((IPV4, PROTOCOL, PORT), text)


def test_elements_are_decoded_with_verdict_and_comment() -> None:
    elements = [
        SetElement(b"\1\2\3\4", Verdict(Code.GOTO, "service-a/b"), comment="a/b:c"),
        SetElement(b"\1\2\3\5", Verdict(Code.DROP)),
        SetElement(b"\1\2\3\6", is_end=True),
    ]
    (message,) = messages.add_elements(TABLE, "name", elements)
    assert list(replies.read_elements(bytes(4) + message.body)) == elements


def test_a_map_of_values_is_decoded_with_its_values() -> None:
    places = (IPV6, PORT)
    declaration = Declaration((MARK,), values=places)
    told = replies.read_set(bytes(4) + messages.add_set(TABLE, "name", declaration, 7).body)
    assert told.declaration == declaration
    elements = [
        SetElement(MARK.parse(str(number)), value=parse_key(places, text))
        for number, text in enumerate(("fd00::1 . 80", "fd00::2 . 65535"))
    ]
    (message,) = messages.add_elements(TABLE, "name", elements)
    assert list(replies.read_elements(bytes(4) + message.body)) == elements


ADDRESSES = st.integers(0, 2**32 - 1).map(lambda number: number.to_bytes(4))


@given(ADDRESSES, ADDRESSES)
def test_an_interval_is_parsed_from_its_text(one: bytes, other: bytes) -> None:
    interval = Interval(min(one, other), max(one, other))
    assert parse_interval(IPV4, interval_text(IPV4, interval)) == interval


@given(st.integers(0, 32), ADDRESSES)
def test_a_prefix_is_written_as_one(length: int, address: bytes) -> None:
    network = ipaddress.ip_network((address, length), strict=False)
    interval = parse_interval(IPV4, str(network))
    assert interval_text(IPV4, interval) == (str(network) if length < 32 else str(network.network_address))


@given(st.lists(st.integers(0, 255), unique=True, max_size=8), st.randoms())
def test_the_intervals_of_a_set_are_computed_from_its_elements(values: list[int], chance: Any) -> None:
    """In any order, with adjacent intervals separate, and with an end before all, as nft adds it."""
    edges = sorted(values)
    wanted = [
        Interval(bytes((255, 255, 255, first)), bytes((255, 255, 255, last)))
        for first, last in zip(edges[::2], edges[1::2], strict=False)
    ]
    elements = [one for each in wanted for one in interval_elements(IPV4, interval_text(IPV4, each))]
    elements.append(SetElement(bytes(4), is_end=True))
    chance.shuffle(elements)
    assert list(intervals(elements)) == wanted


def test_an_interval_with_the_largest_value_has_no_end_element() -> None:
    assert list(interval_elements(IPV6, "ffff::/16")) == [
        SetElement(b"\xff\xff" + bytes(14), is_open=True),
    ]


@pytest.mark.parametrize(
    ("text", "raw"),
    [('"eth0"', b"eth0" + bytes(12)), ('"eth*"', b"eth"), ('"a23456789012345"', b"a23456789012345\0")],
)
def test_a_device_is_matched_by_its_name_or_by_a_prefix(text: str, raw: bytes) -> None:
    assert DEVICE.parse(text) == raw


def test_marks_are_written_in_hexadecimal() -> None:
    assert MARK.text(MARK.parse("0x4000")) == "0x00004000"


@pytest.mark.parametrize("text", ["drop", "accept", "return", "jump a", "goto service-X/y"])
def test_a_verdict_is_converted_to_the_same_text(text: str) -> None:
    assert verdict_text(parse_verdict(text)) == text


@pytest.mark.parametrize("text", ["", "goto", "drop it", "goto a b", "queue"])
def test_unsupported_words_are_not_a_verdict(text: str) -> None:
    with pytest.raises(ValueError):
        parse_verdict(text)
