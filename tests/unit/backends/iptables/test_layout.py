"""What in the kernel is ours, and in which words."""

import pytest

from ebpfproxy.backends.iptables.layout import LAYOUT, LOCALNET_GUARD, NODE_CHAINS, SHARED_CHAINS
from ebpfproxy.backends.iptables.node_rules import node_entries
from ebpfproxy.backends.iptables.settings import IptablesSettings
from ebpfproxy.backends.xtables.entries import FILTER, MANGLE, NAT, Chain, Rule, SharedChain
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan

V4 = Family.IPV4


def test_no_chain_is_of_two_kinds() -> None:
    """A Chain and a SharedChain of one name would be equal, and one key."""
    assert not set(SHARED_CHAINS) & set(NODE_CHAINS)


@pytest.mark.parametrize("family", list(Family))
def test_what_the_node_has_is_known_as_ours(family: Family) -> None:
    for key in node_entries(NodePlan(), family, IptablesSettings()):
        if isinstance(key, Rule):
            assert LAYOUT.is_own(key), key
        else:
            found = LAYOUT.chain_key(family, key.table, key.name)
            assert found == key
            assert type(found) is type(key)


@pytest.mark.parametrize("kind", ["SVC", "SVL", "EXT", "FW", "SEP", "XLB"])
def test_chains_of_services_are_known_by_how_they_begin(kind: str) -> None:
    """KUBE-XLB is of kube-proxy before 1.24, whose leftovers nothing else would take away."""
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
def test_what_others_have_is_not_ours(table: str, name: str) -> None:
    assert LAYOUT.chain_key(V4, table, name) is None


def test_services_have_a_chain_in_each_of_two_tables() -> None:
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
def test_a_jump_to_a_chain_of_ours_is_ours_in_any_words(text: str) -> None:
    """Another version of kube-proxy worded it so; with two jumps packets would go through it all twice."""
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
def test_rules_of_others_are_not_ours(table: str, chain: str, text: str) -> None:
    assert not LAYOUT.is_own(Rule(V4, table, chain, text))


def test_everything_in_a_shared_chain_is_ours() -> None:
    assert LAYOUT.is_own(Rule(V4, NAT, "KUBE-SERVICES", "-j ACCEPT"))
    assert LAYOUT.is_own(Rule(V4, FILTER, "KUBE-FIREWALL", LOCALNET_GUARD))
