"""Parts of rules in the form in which the tools print them."""

import pytest

from ebpfproxy.backends.iptables.rules import comment, from_pods, host, not_from_pods, one_of, source
from ebpfproxy.model.address import parse_address, parse_network
from ebpfproxy.plan.service_plan import LocalTraffic

TO = "10.96.0.10/32"


def cidr(text: str) -> LocalTraffic:
    return LocalTraffic(parse_network(text))


@pytest.mark.parametrize(
    ("traffic", "inside", "outside"),
    [
        (cidr("10.1.0.0/16"), "-s 10.1.0.0/16 ", f"! -s 10.1.0.0/16 -d {TO}"),
        (cidr("fd01::/64"), "-s fd01::/64 ", f"! -s fd01::/64 -d {TO}"),
        (LocalTraffic(interface="cbr0"), "-i cbr0 ", f"-d {TO} ! -i cbr0"),
        (LocalTraffic(interface="cali", prefix=True), "-i cali+ ", f"-d {TO} ! -i cali+"),
    ],
)
def test_pods_are_matched_by_address_or_device(traffic: LocalTraffic, inside: str, outside: str) -> None:
    assert from_pods(traffic) == inside
    assert not_from_pods(traffic, TO) == outside


@pytest.mark.parametrize("everything", ["0.0.0.0/0", "::/0"])
def test_if_everything_is_a_pod_there_is_no_match_for_pods_and_none_for_others(everything: str) -> None:
    """iptables-nft rejects "! -s 0.0.0.0/0", and neither tool prints "-s 0.0.0.0/0"."""
    assert from_pods(cidr(everything)) == ""
    assert not_from_pods(cidr(everything), TO) is None


def test_a_prefix_of_maximum_length_is_a_name() -> None:
    """The tools reject sixteen characters, so no rule of any Service would be written."""
    assert from_pods(LocalTraffic(interface="a" * 14, prefix=True)) == f"-i {'a' * 14}+ "
    assert from_pods(LocalTraffic(interface="a" * 15, prefix=True)) == f"-i {'a' * 15} "


def test_half_of_all_addresses_has_a_match() -> None:
    assert source(parse_network("0.0.0.0/1")) == "-s 0.0.0.0/1 "
    assert source(parse_network("::/1")) == "-s ::/1 "
    assert source(parse_network("0.0.0.0/0")) == source(parse_network("::/0")) == ""


def test_a_single_address_is_written_with_its_length() -> None:
    assert host(parse_address("10.0.0.1")) == "10.0.0.1/32"
    assert host(parse_address("fd00:0::1")) == "fd00::1/128"


def test_a_comment_is_truncated_like_the_tools_do() -> None:
    assert comment("a/b") == '-m comment --comment "a/b"'
    assert comment("a/" + "b" * 300) == f'-m comment --comment "a/{"b" * 253}"'


@pytest.mark.parametrize(
    ("count", "printed"),
    [
        (2, "0.50000000000"),
        (3, "0.33333333349"),
        (5, "0.20000000019"),
        (6, "0.16666666651"),
        (7, "0.14285714272"),
        (1000, "0.00100000016"),
    ],
)
def test_a_probability_has_the_precision_of_the_kernel(count: int, printed: str) -> None:
    """Copied from iptables-save after writing kube-proxy's ten digits."""
    assert one_of(count).endswith(f" {printed}")


@pytest.mark.parametrize("count", [2, 3, 10, 100, 1000])
def test_every_endpoint_has_the_same_probability(count: int) -> None:
    missed = 1.0
    for left in range(count, 1, -1):
        chance = float(one_of(left).rpartition(" ")[2])
        assert missed * chance == pytest.approx(1 / count, rel=1e-5)
        missed *= 1 - chance
    assert missed == pytest.approx(1 / count, rel=1e-5)
