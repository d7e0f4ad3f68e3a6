"""Texts of flags, as Go reads them."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.config import flag_types
from ebpfproxy.model.address import parse_network
from ebpfproxy.plan.service_plan import SocketLb


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("1m30s", 90.0),
        ("1h", 3600.0),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("100ms", 0.1),
        ("5us", 5e-6),
        ("5µs", 5e-6),
        ("7ns", 7e-9),
        ("-1m", -60.0),
        ("+2s", 2.0),
        ("0", 0.0),
    ],
)
def test_a_duration_is_read_as_go_reads_it(text: str, seconds: float) -> None:
    assert math.isclose(flag_types.parse_duration(text), seconds)


@pytest.mark.parametrize(
    "text", ["", "30", "s", "1d", "1 s", "1s ", "1..s", ".s", "--1s", "1S", "٣s", "1e3s"]
)
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        flag_types.parse_duration(text)


@given(st.integers(0, 1000), st.integers(0, 59), st.integers(0, 59))
def test_hours_minutes_and_seconds_add_up(hours: int, minutes: int, seconds: int) -> None:
    assert flag_types.parse_duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@given(st.text())
def test_random_text_raises_only_value_error(text: str) -> None:
    for kind in (
        flag_types.IP,
        flag_types.LISTEN_ADDRESS,
        flag_types.PORT,
        flag_types.BOOLEAN,
        flag_types.TIMEOUT,
        flag_types.SOCKET_LB,
    ):
        with contextlib.suppress(ValueError):
            kind.parse(text)


@pytest.mark.parametrize("text", ["1", "t", "T", "TRUE", "true", "True"])
def test_six_spellings_of_true_are_accepted(text: str) -> None:
    assert flag_types.parse_boolean(text) is True


@pytest.mark.parametrize("text", ["yes", "on", "", "tRUE"])
def test_other_spellings_of_booleans_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="neither true nor false"):
        flag_types.parse_boolean(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0", ("0.0.0.0", 10256)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("::", ("::", 10256)),
        ("fd00::1", ("fd00::1", 10256)),
        ("[fd00::1]:9", ("fd00::1", 9)),
        ("fd00::1:80", ("fd00::1:80", 10256)),
        ("010.0.0.1", ("10.0.0.1", 10256)),
    ],
)
def test_a_listen_address_without_a_port_gets_the_default_port(text: str, expected: tuple[str, int]) -> None:
    assert flag_types.split_listen_address(text, 10256) == expected


@pytest.mark.parametrize(
    "text", ["localhost:80", "localhost", ":80", "1.2.3.4:", "1.2.3.4:x", "[::1]", "[1.2.3.4]:80"]
)
def test_an_invalid_listen_address_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not an IP address"):
        flag_types.parse_listen_address(text)


@pytest.mark.parametrize("text", ["1.2.3.4:0", "1.2.3.4:65536", "[::1]:99999"])
def test_a_port_out_of_range_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="not between 1 and 65535"):
        flag_types.parse_listen_address(text)


def test_node_port_addresses_are_comma_separated_and_repeatable() -> None:
    parsed = flag_types.parse_node_port_addresses(["10.0.0.0/8, 192.168.0.0/16", "fd00::/8"])
    networks = tuple(map(parse_network, ["10.0.0.0/8", "192.168.0.0/16", "fd00::/8"]))
    assert parsed == flag_types.NodePortAddresses(networks, primary=False)


def test_empty_node_port_addresses_mean_all_addresses() -> None:
    assert flag_types.parse_node_port_addresses([""]) == flag_types.NodePortAddresses()


def test_words_for_node_port_addresses_can_be_combined_with_networks() -> None:
    """As of kube-proxy 1.37."""
    parsed = flag_types.parse_node_port_addresses(["primary, localhost", "10.0.0.0/8"])
    networks = tuple(map(parse_network, ["127.0.0.0/8", "::1/128", "10.0.0.0/8"]))
    assert parsed == flag_types.NodePortAddresses(networks, primary=True)
    everything = tuple(map(parse_network, ["0.0.0.0/0", "::/0"]))
    assert flag_types.parse_node_port_addresses(["all"]) == flag_types.NodePortAddresses(everything)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("0s", 0), ("1ns", 1), ("1500ms", 2), ("24h", 86400), ("2147483647s", 2147483647)],
)
def test_a_timeout_is_rounded_up_to_whole_seconds(text: str, seconds: int) -> None:
    assert flag_types.parse_timeout(text) == seconds


@pytest.mark.parametrize("text", ["9999999999h", "9" * 400 + "h", "-" + "9" * 400 + "s"])
def test_a_duration_that_go_cannot_hold_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is longer than 292 years"):
        flag_types.parse_timeout(text)


@pytest.mark.parametrize("text", ["-1s", "-1ms", "2147483648s", "999999h"])
def test_a_timeout_out_of_range_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not between 0 and 2147483647s"):
        flag_types.parse_timeout(text)


def test_device_patterns_are_comma_separated_and_repeatable() -> None:
    assert flag_types.parse_device_patterns(["eth*, bond0,", "wg[0-9]", ""]) == ("eth*", "bond0", "wg[0-9]")


def test_none_means_no_device_and_excludes_other_patterns() -> None:
    assert flag_types.parse_device_patterns([" none,"]) == ("none",)
    with pytest.raises(ValueError, match='"none" excludes other patterns'):
        flag_types.parse_device_patterns(["eth0", "none"])


@pytest.mark.parametrize("text", ["eth 0", "a/b", "eth0\tbond0"])
def test_a_pattern_that_matches_no_device_name_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a pattern for device names"):
        flag_types.parse_device_patterns([text])


@pytest.mark.parametrize("text", ["", "cbr0", "cali", "eth0.100", "a" * 15, "br-é"])
def test_a_valid_device_name_is_accepted(text: str) -> None:
    assert flag_types.parse_device_name(text) == text


@pytest.mark.parametrize("text", ["a b", "a/b", "a:1", 'a"', "a'", "a\\", "cali*", "a" * 16, "é" * 8, "a\n"])
def test_an_invalid_device_name_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a device name"):
        flag_types.parse_device_name(text)


def test_the_cluster_has_up_to_one_cidr_of_each_family() -> None:
    four, six = parse_network("10.244.0.0/16"), parse_network("fd00::/48")
    assert flag_types.parse_cluster_cidrs("") == ()
    assert flag_types.parse_cluster_cidrs("10.244.0.0/16") == (four,)
    assert flag_types.parse_cluster_cidrs("fd00::/48, 10.244.0.0/16") == (six, four)


@pytest.mark.parametrize("text", ["10.0.0.0/8,", ",", "10.0.0.0", "10.0.0.0/8;fd00::/8"])
def test_an_invalid_list_of_cidrs_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a CIDR|is not an IP address"):
        flag_types.parse_cluster_cidrs(text)


@pytest.mark.parametrize("text", ["10.0.0.0/8,10.1.0.0/16", "fd00::/8,10.0.0.0/8,fd01::/16"])
def test_two_cidrs_of_a_family_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="has more than one CIDR of a family"):
        flag_types.parse_cluster_cidrs(text)


def test_socket_lb_is_on_by_default() -> None:
    texts = ["", "on", "host", "off"]
    assert list(map(flag_types.parse_socket_lb, texts)) == [
        SocketLb.ON,
        SocketLb.ON,
        SocketLb.HOST,
        SocketLb.OFF,
    ]


def test_an_address_without_a_prefix_length_is_not_a_network() -> None:
    with pytest.raises(ValueError, match="not a CIDR"):
        flag_types.parse_node_port_addresses(["10.0.0.0"])
