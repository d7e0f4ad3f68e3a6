"""The rules of the node, which do not depend on Services."""

import pytest

from ebpfproxy.backends.iptables.chains import LOCALNET_GUARD, NODE_CHAINS, SHARED_CHAINS
from ebpfproxy.backends.iptables.entries import FILTER, NAT, Chain, Rule, RulePosition, SharedChain
from ebpfproxy.backends.iptables.rules import IptablesSettings, answers_on_loopback, node_entries
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.service_plan import NodePlan
from tests.support.iptables_walk import ruleset

V4, V6 = Family.IPV4, Family.IPV6
BOTH = pytest.mark.parametrize("family", list(Family), ids=lambda family: family.value)
SETTINGS = IptablesSettings()
NOTE = '-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain"'


def node(*answering: str, everywhere: bool = True) -> NodePlan:
    networks = frozenset(map(parse_network, answering))
    return NodePlan(networks, networks, (), frozenset(Family) if everywhere else frozenset())


def last_rules(plan: NodePlan, family: Family) -> list[str]:
    """Return the rules about NodePorts, without their common parts."""
    entries = node_entries(plan, family, SETTINGS)
    rules = [key for key, place in entries.items() if place is RulePosition.LAST]
    assert all(
        isinstance(each, Rule) and (each.table, each.chain) == (NAT, "KUBE-SERVICES") for each in rules
    )
    texts = [each.text for each in rules if isinstance(each, Rule)]
    assert all(text.endswith(" -j KUBE-NODEPORTS") and NOTE in text for text in texts)
    return [text.removesuffix(" -j KUBE-NODEPORTS").replace(NOTE, "*") for text in texts]


@BOTH
def test_the_node_creates_every_shared_chain(family: Family) -> None:
    entries = node_entries(node(), family, SETTINGS)
    assert {key: entry for key, entry in entries.items() if isinstance(key, SharedChain)} == {
        SharedChain(family, table, name): () for table, name in SHARED_CHAINS
    }
    own = {(key.table, key.name) for key in entries if isinstance(key, Chain)}
    assert own == set(NODE_CHAINS)


@BOTH
def test_the_same_chains_as_in_kube_proxy_have_rules(family: Family) -> None:
    entries = node_entries(node(), family, SETTINGS)
    assert entries[Chain(family, NAT, "KUBE-POSTROUTING")] == (
        "-m mark ! --mark 0x4000/0x4000 -j RETURN",
        "-j MARK --set-xmark 0x4000/0x0",
        '-m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully',
    )
    assert entries[Chain(family, NAT, "KUBE-MARK-MASQ")] == ("-j MARK --set-xmark 0x4000/0x4000",)
    assert entries[Chain(family, FILTER, "KUBE-FORWARD")] == (
        "-m conntrack --ctstate INVALID -j DROP",
        '-m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT',
        '-m comment --comment "kubernetes forwarding conntrack rule"'
        " -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    )
    for table in ("mangle", NAT, FILTER):
        assert entries[Chain(family, table, "KUBE-PROXY-CANARY")] == ()


def test_each_setting_changes_its_rules() -> None:
    settings = IptablesSettings(masquerade_bit=31, tcp_be_liberal=True)
    changed, plain = node_entries(node(), V4, settings), node_entries(node(), V4, SETTINGS)
    differing = {key for key in plain if changed.get(key) != plain[key]}
    postrouting, mark = Chain(V4, NAT, "KUBE-POSTROUTING"), Chain(V4, NAT, "KUBE-MARK-MASQ")
    forward = Chain(V4, FILTER, "KUBE-FORWARD")
    assert differing == {postrouting, mark, forward}
    assert changed.keys() == plain.keys()
    rules = changed[postrouting]
    assert isinstance(rules, tuple)
    assert rules[0] == "-m mark ! --mark 0x80000000/0x80000000 -j RETURN"
    assert "INVALID" not in str(changed[forward])


def test_dropped_invalid_packets_are_counted() -> None:
    forward = Chain(V4, FILTER, "KUBE-FORWARD")
    counted = node_entries(node(), V4, IptablesSettings(counts_packets=True))[forward]
    assert isinstance(counted, tuple)
    assert counted[0] == (
        "-m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP"
    )
    assert counted[1:] == node_entries(node(), V4, SETTINGS)[forward][1:]  # type: ignore[index]


def test_jumps_have_the_order_of_kube_proxy() -> None:
    """The last entry of iptablesJumpChains in proxier.go is on top. Here, the top rule of each chain comes
    first.
    """
    rules = ruleset(node_entries(node(), V4, SETTINGS))
    found = {chain: texts for chain, texts in rules.items() if not chain[1].startswith("KUBE-")}
    new = "-m conntrack --ctstate NEW "
    firewall = f'{new}-m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL'
    portals = '-m comment --comment "kubernetes service portals" -j KUBE-SERVICES'
    external = (
        f'{new}-m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES'
    )
    assert found == {
        (FILTER, "INPUT"): [
            "-j KUBE-FIREWALL",
            firewall,
            '-m comment --comment "kubernetes health check service ports" -j KUBE-NODEPORTS',
            external,
        ],
        (FILTER, "FORWARD"): [
            firewall,
            '-m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD',
            f"{new}{portals}",
            external,
        ],
        (FILTER, "OUTPUT"): ["-j KUBE-FIREWALL", firewall, f"{new}{portals}"],
        (NAT, "OUTPUT"): [portals],
        (NAT, "PREROUTING"): [portals],
        (NAT, "POSTROUTING"): ['-m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING'],
    }


def test_ipv4_always_has_the_guard_of_loopback() -> None:
    guard = Rule(V4, FILTER, "KUBE-FIREWALL", LOCALNET_GUARD)
    for plan in (node(), node("127.0.0.0/8"), node("192.0.2.10/32", everywhere=False)):
        assert node_entries(plan, V4, SETTINGS)[guard] is RulePosition.ANYWHERE
        assert not any(
            key.chain == "KUBE-FIREWALL" for key in node_entries(plan, V6, SETTINGS) if isinstance(key, Rule)
        )


def test_node_ports_answer_on_every_local_address_by_default() -> None:
    assert last_rules(node("192.0.2.10/32", "127.0.0.0/8"), V4) == ["* -m addrtype --dst-type LOCAL"]


def test_node_ports_do_not_answer_on_excluded_loopback() -> None:
    assert not answers_on_loopback(node("192.0.2.10/32", "::1/128"))
    assert last_rules(node("192.0.2.10/32"), V4) == ["! -d 127.0.0.0/8 * -m addrtype --dst-type LOCAL"]


@pytest.mark.parametrize("local", ["0.0.0.0/0", "127.0.0.0/8", "127.0.0.1/32"])
def test_node_ports_answer_on_loopback_if_a_part_of_it_is_included(local: str) -> None:
    assert answers_on_loopback(node(local))
    assert last_rules(node(local), V4) == ["* -m addrtype --dst-type LOCAL"]


@pytest.mark.parametrize("local", ["::1/128", "2001:db8::10/128", "::/0"])
def test_node_ports_never_answer_on_loopback_of_ipv6(local: str) -> None:
    """A packet from ::1 does not leave the node, whatever its destination becomes."""
    assert last_rules(node(local), V6) == ["! -d ::1/128 * -m addrtype --dst-type LOCAL"]


def test_each_address_for_node_ports_has_a_rule() -> None:
    plan = node("192.0.2.10/32", "127.0.0.1/32", "::1/128", "2001:db8::10/128", everywhere=False)
    assert last_rules(plan, V4) == ["-d 127.0.0.1/32 *", "-d 192.0.2.10/32 *"]
    assert last_rules(plan, V6) == ["-d 2001:db8::10/128 *"]


def test_without_matching_local_addresses_there_is_no_rule() -> None:
    plan = node(everywhere=False)
    assert last_rules(plan, V4) == last_rules(plan, V6) == []


def test_addresses_can_be_restricted_for_one_family_only() -> None:
    plan = NodePlan(frozenset(), frozenset(map(parse_network, ("192.0.2.10/32",))), (), frozenset({V6}))
    assert last_rules(plan, V4) == ["-d 192.0.2.10/32 *"]
    assert last_rules(plan, V6) == ["! -d ::1/128 * -m addrtype --dst-type LOCAL"]


@pytest.mark.parametrize("local", ["0.0.0.0/0", "127.0.0.0/8", "198.51.100.0/24"])
def test_a_local_network_that_is_no_single_address_has_no_rule(local: str) -> None:
    """kube-proxy reads the addresses of devices: GetNodeIPs in pkg/proxy/util/nodeport_addresses.go."""
    plan = node("127.0.0.1/32", "192.0.2.10/32", local, everywhere=False)
    assert last_rules(plan, V4) == ["-d 127.0.0.1/32 *", "-d 192.0.2.10/32 *"]
