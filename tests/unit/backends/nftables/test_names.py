"""The names of a ServicePort's objects: those in kube-proxy's own tests, and the limits of nftables."""

import re

import pytest

from ebpfproxy.backends.nftables.names import (
    affinity_number,
    affinity_number_of_set,
    comment,
    endpoint_name,
    port_name,
)
from ebpfproxy.model.address import Protocol, parse_address
from ebpfproxy.model.service import ServicePortName

LEGAL = re.compile(r"[A-Za-z0-9_./-]{1,240}")
LABEL = "a" * 63


def port(number: int, label: str = "p80", protocol: Protocol = Protocol.TCP) -> ServicePortName:
    return ServicePortName(f"ns{number}", f"svc{number}", label, protocol)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (port(1), "ULMVA6XW-ns1/svc1/tcp/p80"),
        (port(2), "42NFTM6N-ns2/svc2/tcp/p80"),
        (port(3), "4AT6LBPK-ns3/svc3/tcp/p80"),
        (port(4), "LAUZTJTB-ns4/svc4/tcp/p80"),
        (
            ServicePortName("default", "kubernetes", "https", Protocol.TCP),
            "2QRHZV4L-default/kubernetes/tcp/https",
        ),
        (
            ServicePortName("kube-system", "kube-dns", "dns", Protocol.UDP),
            "FY5PMXPG-kube-system/kube-dns/udp/dns",
        ),
    ],
)
def test_a_port_has_the_name_that_kube_proxy_gives_it(name: ServicePortName, expected: str) -> None:
    assert port_name(name) == expected


@pytest.mark.parametrize(
    ("number", "address", "expected"),
    [
        (1, "10.180.0.1", "5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80"),
        (2, "10.180.0.2", "SGOXE6O3-ns2/svc2/tcp/p80__10.180.0.2/80"),
        (3, "10.180.0.3", "UEIP74TE-ns3/svc3/tcp/p80__10.180.0.3/80"),
        (4, "10.180.0.4", "UNZV3OEC-ns4/svc4/tcp/p80__10.180.0.4/80"),
        (4, "10.180.0.5", "5RFCDDV7-ns4/svc4/tcp/p80__10.180.0.5/80"),
    ],
)
def test_an_endpoint_has_the_name_that_kube_proxy_gives_it(number: int, address: str, expected: str) -> None:
    assert endpoint_name(port(number), parse_address(address), 80) == expected


def test_the_number_of_an_endpoint_follows_from_the_name_of_its_set_in_kube_proxy() -> None:
    """So the clients stay known if the agent takes over the sets of kube-proxy, also with truncated names."""
    for name in (port(1), ServicePortName(LABEL, LABEL, LABEL, Protocol.SCTP)):
        address = parse_address("fd00:1111:2222:3333:4444:5555:6666:7777")
        set_name = f"affinity-{endpoint_name(name, address, 80)}"
        assert affinity_number_of_set(set_name) == affinity_number(name, address, 80)
    assert affinity_number_of_set("affinity") is affinity_number_of_set("cluster-ips") is None


def test_the_name_of_an_unnamed_port_ends_with_the_protocol() -> None:
    name = ServicePortName("kube-system", "kube-dns", "", Protocol.TCP)
    assert port_name(name).endswith("-kube-system/kube-dns/tcp/")


def test_an_ipv6_address_in_a_name_has_no_colons() -> None:
    assert endpoint_name(port(1), parse_address("fd00::1"), 80).endswith("__fd00..1/80")


@pytest.mark.parametrize("other", [port(1, protocol=Protocol.UDP), port(1, "p81"), port(1, ""), port(11)])
def test_any_difference_results_in_another_name(other: ServicePortName) -> None:
    assert port_name(other) != port_name(port(1))


def test_a_long_name_is_truncated_and_stays_unique() -> None:
    address = parse_address("fd00:1111:2222:3333:4444:5555:6666:7777")
    long = ServicePortName(LABEL, LABEL, LABEL, Protocol.SCTP)
    names = {endpoint_name(long, address, number) for number in (65534, 65535)}
    assert len(names) == 2
    assert all(LEGAL.fullmatch(name) and name.endswith("...") for name in names)


@pytest.mark.parametrize("label", ['a b"; flush ruleset', "ä", "a\nb", "\ud800", "{"])
def test_a_name_that_no_api_server_admits_cannot_break_out_of_a_command(label: str) -> None:
    names = [
        ServicePortName("default", label, "", Protocol.TCP),
        ServicePortName("default", "_", "", Protocol.TCP),
    ]
    assert all(LEGAL.fullmatch(port_name(name)) for name in names)
    assert port_name(names[0]) != port_name(names[1])
    assert re.fullmatch(r"default/[A-Za-z0-9_./:-]+", comment(names[0]))


def test_a_comment_is_no_longer_than_the_kernel_keeps() -> None:
    assert len(comment(ServicePortName(LABEL, LABEL, LABEL, Protocol.TCP))) == 128
