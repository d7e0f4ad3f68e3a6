"""Names of chains: those that kube-proxy's own tests expect, and what they have to be able to tell apart."""

import pytest

from ebpfproxy.backends.iptables.names import endpoint_chain, service_chains
from ebpfproxy.backends.xtables.names import SERVICE_PREFIXES
from ebpfproxy.model.address import Protocol
from ebpfproxy.model.service import ServicePortName


def port(number: int, label: str = "p80", protocol: Protocol = Protocol.TCP) -> ServicePortName:
    return ServicePortName(f"ns{number}", f"svc{number}", label, protocol)


@pytest.mark.parametrize(
    ("name", "hashed"),
    [
        (port(1), "XPGD46QRK7WJZT7O"),
        (port(2), "GNZBNJ2PO5MGZ6GT"),
        (port(3), "X27LE4BHSL4DOUIK"),
        (port(4), "4SW47YFZTEDKD3PK"),
        (port(5), "NUKIZ6OKUXPJNT4C"),
        (port(2, "p8080"), "2VJB64SDSIJUP5T6"),
    ],
)
def test_the_chains_of_a_port_have_the_names_that_kube_proxy_gives_them(
    name: ServicePortName, hashed: str
) -> None:
    assert service_chains(name) == tuple(f"KUBE-{kind}-{hashed}" for kind in ("SVC", "SVL", "EXT", "FW"))


@pytest.mark.parametrize(
    ("number", "endpoint", "hashed"),
    [
        (1, "10.180.0.1:80", "SXIVWICOYRO3J4NJ"),
        (2, "10.180.0.2:80", "RS4RBKLTHTF2IUXJ"),
        (3, "10.180.0.3:80", "OYPFS5VJICHGATKP"),
        (4, "10.180.0.4:80", "UKSFD7AGPMPPLUHC"),
        (4, "10.180.0.5:80", "C6EBXVWJJZMIWKLZ"),
        (5, "10.180.0.3:80", "I77PXRDZVX7PMWMN"),
    ],
)
def test_the_chain_of_an_endpoint_has_the_name_that_kube_proxy_gives_it(
    number: int, endpoint: str, hashed: str
) -> None:
    assert endpoint_chain(port(number), endpoint) == f"KUBE-SEP-{hashed}"


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        (ServicePortName("default", "kubernetes", "https", Protocol.TCP), "KUBE-SVC-NPX46M4PTMTKRN6Y"),
        (ServicePortName("kube-system", "kube-dns", "dns", Protocol.UDP), "KUBE-SVC-TCOU7JCQXEZGVUNU"),
        (ServicePortName("kube-system", "kube-dns", "dns-tcp", Protocol.TCP), "KUBE-SVC-ERIFXISQEP7F7OF4"),
        (ServicePortName("default", "nginx", "", Protocol.TCP), "KUBE-SVC-2CMXP7HKUVJN7L6M"),
    ],
)
def test_the_chains_that_everybody_has_seen_have_their_names(name: ServicePortName, chain: str) -> None:
    """Of any cluster of kubeadm, and of the Service that everybody tries first: its port is unnamed."""
    assert service_chains(name).cluster == chain


def test_the_protocol_is_part_of_the_name() -> None:
    assert service_chains(port(1)) != service_chains(port(1, protocol=Protocol.UDP))


def test_no_name_is_longer_than_the_kernel_allows() -> None:
    long = ServicePortName("n" * 63, "s" * 63, "p" * 15, Protocol.SCTP)
    names = [*service_chains(long), endpoint_chain(long, "[fd00:1111:2222:3333:4444:5555:6666:7777]:65535")]
    assert all(len(name) <= 28 and name.startswith(SERVICE_PREFIXES) for name in names)
