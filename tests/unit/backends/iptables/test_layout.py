"""The chains and rules of mode iptables, and the names of chains that kube-proxy's own tests expect."""

import pytest

from ebpfproxy.backends.iptables.chains import (
    LAYOUT,
    LOCALNET_GUARD,
    NODE_CHAINS,
    SERVICE_PREFIXES,
    SHARED_CHAINS,
    endpoint_chain,
    service_chains,
)
from ebpfproxy.backends.iptables.entries import FILTER, MANGLE, NAT, Chain, Rule, SharedChain
from ebpfproxy.backends.iptables.rules import IptablesSettings, node_entries
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import NodePlan

V4 = Family.IPV4


def test_no_chain_is_of_two_kinds() -> None:
    """A Chain and a SharedChain of one name would be equal, so they would be one key."""
    assert not set(SHARED_CHAINS) & set(NODE_CHAINS)


@pytest.mark.parametrize("family", list(Family))
def test_entries_of_the_node_are_recognized_as_own(family: Family) -> None:
    for key in node_entries(NodePlan(), family, IptablesSettings()):
        if isinstance(key, Rule):
            assert LAYOUT.is_own(key), key
        else:
            found = LAYOUT.chain_key(family, key.table, key.name)
            assert found == key
            assert type(found) is type(key)


@pytest.mark.parametrize("kind", ["SVC", "SVL", "EXT", "FW", "SEP", "XLB"])
def test_chains_of_services_are_recognized_by_prefix(kind: str) -> None:
    """KUBE-XLB is a prefix of kube-proxy before 1.24. Nothing else would remove these chains."""
    name = f"KUBE-{kind}-XPGD46QRK7WJZT7O"
    assert LAYOUT.chain_key(V4, NAT, name) == Chain(V4, NAT, name)
    assert LAYOUT.chain_key(V4, FILTER, name) is None


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (MANGLE, "KUBE-IPTABLES-HINT"),
        (MANGLE, "KUBE-KUBELET-CANARY"),
        (NAT, "KUBE-KUBELET-CANARY"),
        (NAT, "KUBE-MARK-DROP"),
        (NAT, "KUBE-NODE-PORT"),
        (NAT, "PREROUTING"),
        (NAT, "DOCKER"),
        (FILTER, "KUBE-ROUTER-FORWARD"),
        (FILTER, "KUBE-POSTROUTING"),
    ],
)
def test_chains_of_other_programs_are_not_own(table: str, name: str) -> None:
    assert LAYOUT.chain_key(V4, table, name) is None


def test_kube_services_is_a_shared_chain_in_two_tables() -> None:
    assert LAYOUT.chain_key(V4, NAT, "KUBE-SERVICES") == SharedChain(V4, NAT, "KUBE-SERVICES")
    assert LAYOUT.chain_key(V4, FILTER, "KUBE-SERVICES") == SharedChain(V4, FILTER, "KUBE-SERVICES")


@pytest.mark.parametrize(
    "text",
    [
        '-m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
        "-j KUBE-SERVICES",
        "-m conntrack --ctstate NEW -j KUBE-SERVICES",
    ],
)
def test_a_jump_to_an_own_chain_is_own_in_any_wording(text: str) -> None:
    """Other versions of kube-proxy use this wording. With two jumps, packets would pass all rules twice."""
    assert LAYOUT.is_own(Rule(V4, NAT, "PREROUTING", text))


@pytest.mark.parametrize(
    ("table", "chain", "text"),
    [
        (NAT, "PREROUTING", "-j DOCKER"),
        (NAT, "POSTROUTING", "-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"),
        (NAT, "PREROUTING", "-j KUBE-PROXY-FIREWALL"),
        (FILTER, "FORWARD", "-j KUBE-ROUTER-FORWARD"),
        (FILTER, "INPUT", "-p tcp -m tcp --dport 22 -j ACCEPT"),
        (FILTER, "INPUT", '-m comment --comment "no target"'),
        (FILTER, "KUBE-FIREWALL", "-m mark --mark 0x8000/0x8000 -j DROP"),
    ],
)
def test_rules_of_other_programs_are_not_own(table: str, chain: str, text: str) -> None:
    assert not LAYOUT.is_own(Rule(V4, table, chain, text))


def test_every_rule_in_a_shared_chain_is_own() -> None:
    assert LAYOUT.is_own(Rule(V4, NAT, "KUBE-SERVICES", "-j ACCEPT"))
    assert LAYOUT.is_own(Rule(V4, FILTER, "KUBE-FIREWALL", LOCALNET_GUARD))


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
def test_well_known_chains_have_their_names(name: ServicePortName, chain: str) -> None:
    """The chains of any kubeadm cluster, and that of a Service nginx with an unnamed port."""
    assert service_chains(name).cluster == chain


def test_the_protocol_is_part_of_the_name() -> None:
    assert service_chains(port(1)) != service_chains(port(1, protocol=Protocol.UDP))


def test_no_name_is_longer_than_the_kernel_allows() -> None:
    long = ServicePortName("n" * 63, "s" * 63, "p" * 15, Protocol.SCTP)
    names = [*service_chains(long), endpoint_chain(long, "[fd00:1111:2222:3333:4444:5555:6666:7777]:65535")]
    assert all(len(name) <= 28 and name.startswith(SERVICE_PREFIXES) for name in names)
