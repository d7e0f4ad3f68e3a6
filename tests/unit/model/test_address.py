"""Addresses and networks: what is parsed, what is rejected, and that text and bytes agree."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.model.address import (
    V4_PREFIX,
    Family,
    Network,
    contains,
    family,
    format_address,
    format_endpoint,
    format_network,
    is_unspecified,
    network,
    network_family,
    parse_address,
    parse_network,
    unspecified,
)

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

V4 = st.ip_addresses(v=4)
V6 = st.ip_addresses(v=6).filter(lambda a: a.packed[:12] != V4_PREFIX)


@given(V4 | V6)
def test_a_formatted_address_parses_to_the_same_address(address: IP) -> None:
    parsed = parse_address(str(address))
    assert parsed == (address.packed if address.version == 6 else V4_PREFIX + address.packed)
    assert ipaddress.ip_address(format_address(parsed)) == address
    assert parse_address(format_address(parsed)) == parsed
    assert family(parsed) is (Family.IPV4 if address.version == 4 else Family.IPV6)


@given(V4, st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_octets_with_leading_zeros_are_decimal(address: IP, zeros: list[int]) -> None:
    octets = str(address).split(".")
    padded = ".".join("0" * many + octet for many, octet in zip(zeros, octets, strict=True))
    assert parse_address(padded) == V4_PREFIX + address.packed


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "10.0.0",
        "10.0.0.0.1",
        "256.0.0.1",
        "10.0.0.99999999999",
        "0x0a.0.0.1",
        "10.0.0.1 ",
        " 10.0.0.1",
        "10.0.0.1\n",
        "10.0.0.1/8",
        "10.0.0.-1",
        "10.0.0.+1",
        "10.0.0.1:80",
        "[::1]",
        "::1%lo",
        "fe80::1%eth0",
        ":::",
        "1:2:3:4:5:6:7:8:9",
        "::ffff:10.0.0.256",
        "10.0.0.1\x00",
        "::1\x00",
        "\ud800",
        "::\ud800",
        "１０.0.0.1",
        "١٠.0.0.1",
        "localhost",
        "1" * 5000,
    ],
)
def test_an_invalid_address_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not an IP address"):
        parse_address(text)


@given(st.text(alphabet="0123456789abcdef.:/% \x00\ud800", max_size=45))
def test_parsing_any_text_gives_16_bytes_or_a_value_error(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert len(address) == 16


@given(st.text(alphabet="0123456789abcdef.:/% \x00\ud800", max_size=45) | st.text())
def test_parsing_any_cidr_gives_a_network_without_host_bits_or_a_value_error(text: str) -> None:
    try:
        net = parse_network(text)
    except ValueError:
        return
    assert 0 <= net.length <= 128
    assert network(net.address, net.length) == net


def test_an_ipv4_mapped_address_is_the_ipv4_address() -> None:
    assert parse_address("::ffff:10.0.0.1") == parse_address("10.0.0.1")
    assert family(parse_address("::ffff:10.0.0.1")) is Family.IPV4


@given(V4 | V6, st.integers(0, 128))
def test_host_bits_of_a_cidr_are_cleared(address: IP, length: int) -> None:
    length = min(length, address.max_prefixlen)
    expected = ipaddress.ip_network((address.packed, length), strict=False)
    parsed = parse_network(f" {address}/{length}\t")
    assert parsed == parse_network(str(expected))
    assert contains(parsed, parse_address(str(address)))
    if length or address.version == 4:
        assert network_family(parsed) is family(parse_address(str(address)))
        assert ipaddress.ip_network(format_network(parsed)) == expected


@given(V4, st.integers(0, 32), V4 | V6)
def test_contains_agrees_with_the_module_ipaddress(
    start: ipaddress.IPv4Address, length: int, other: IP
) -> None:
    reference = ipaddress.ip_network((start.packed, length), strict=False)
    assert contains(parse_network(f"{start}/{length}"), parse_address(str(other))) == (other in reference)


@pytest.mark.parametrize(
    "text",
    ["10.0.0.0", "10.0.0.0/", "10.0.0.0/33", "::/129", "10.0.0.0/-1", "10.0.0.0/ 8", "/8", "10.0.0.0/8/8"],
)
def test_an_invalid_cidr_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_network(text)


def test_an_ipv4_address_is_in_the_network_of_all_ipv4_and_in_no_ipv6_network() -> None:
    everything = parse_network("0.0.0.0/0")
    assert everything == Network(parse_address("0.0.0.0"), 96)
    assert contains(everything, parse_address("203.0.113.9"))
    assert not contains(everything, parse_address("2001:db8::1"))
    assert not contains(parse_network("2000::/3"), parse_address("32.0.0.1"))


def test_only_the_unspecified_addresses_are_unspecified() -> None:
    assert unspecified(Family.IPV4) == parse_address("0.0.0.0")
    assert unspecified(Family.IPV6) == parse_address("::")
    assert all(is_unspecified(unspecified(of)) for of in Family)
    assert not is_unspecified(parse_address("::1"))


def test_a_network_is_formatted_as_a_cidr() -> None:
    assert str(parse_network("10.1.2.3/8")) == "10.0.0.0/8"
    assert str(parse_network("fd00::1/64")) == "fd00::/64"


def test_an_ipv6_endpoint_is_formatted_with_brackets() -> None:
    assert format_endpoint(parse_address("10.0.0.1"), 80) == "10.0.0.1:80"
    assert format_endpoint(parse_address("fd00:0:0::1"), 80) == "[fd00::1]:80"
