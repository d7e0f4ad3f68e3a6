"""The objects that all Services share."""

import ipaddress
import re

import pytest

from ebpfproxy.backends.nftables.backend import render
from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, Element, Entry, Key, Map, Set
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.model.address import Family, parse_network
from ebpfproxy.plan.service_plan import NodePlan

SETTINGS = NftablesSettings()

CHAINS = {
    "filter-prerouting-pre-dnat": """
        type filter hook prerouting priority -110; policy accept;
        ct state new jump firewall-check""",
    "filter-output-pre-dnat": """
        type filter hook output priority -110; policy accept;
        ct state new jump firewall-check""",
    "filter-input": """
        type filter hook input priority 0; policy accept;
        ct state new jump nodeport-endpoints-check
        ct state new jump service-endpoints-check""",
    "filter-forward": """
        type filter hook forward priority 0; policy accept;
        ct state new jump service-endpoints-check
        ct state new jump cluster-ips-check""",
    "filter-output": """
        type filter hook output priority 0; policy accept;
        ct state new jump service-endpoints-check
        ct state new jump cluster-ips-check""",
    "nat-prerouting-first": """
        type nat hook prerouting priority -101; policy accept;
        jump services""",
    "nat-output-first": """
        type nat hook output priority -101; policy accept;
        jump services""",
    "nat-postrouting-first": """
        type nat hook postrouting priority 99; policy accept;
        jump masquerading""",
    "services": """
        ip daddr . meta l4proto . th dport vmap @service-ips
        fib daddr type local ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @service-nodeports""",
    "service-endpoints-check": """
        ip daddr . meta l4proto . th dport vmap @no-endpoint-services""",
    "nodeport-endpoints-check": """
        ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @no-endpoint-nodeports""",
    "firewall-check": """
        ip daddr . meta l4proto . th dport vmap @firewall-ips""",
    "cluster-ips-check": """
        ip daddr @cluster-ips fib daddr type != local reject comment "Reject traffic to invalid ports of ClusterIPs\"""",  # noqa: E501
    "reject-chain": """
        reject""",
    "mark-for-masquerade": """
        meta mark set meta mark | 0x00004000""",
    "masquerading": """
        meta mark & 0x00004000 != 0x00000000 meta mark set meta mark ^ 0x00004000 masquerade fully-random
        ct status dnat {same} masquerade fully-random""".format(
        same=" ".join(f"@nh,{bit},8 . @nh,{bit + 32},8 @equal-bytes" for bit in (120, 112, 104, 96))
    ),
}

CONTAINERS = {
    "set cluster-ips": "type ipv4_addr;",
    "set equal-bytes": "type mark . mark;",
    "map service-ips": "type ipv4_addr . inet_proto . inet_service : verdict;",
    "map service-nodeports": "type inet_proto . inet_service : verdict;",
    "map no-endpoint-services": "type ipv4_addr . inet_proto . inet_service : verdict;",
    "map no-endpoint-nodeports": "type inet_proto . inet_service : verdict;",
    "map firewall-ips": "type ipv4_addr . inet_proto . inet_service : verdict;",
}


def chains(entries: dict[Key, Entry]) -> dict[str, list[str]]:
    """Return the hook, if any, and the rules of each chain, by name."""
    return {
        key.name: [*filter(None, [entry.hook]), *map(str, entry.rules)]
        for key, entry in entries.items()
        if isinstance(key, Chain) and isinstance(entry, ChainEntry)
    }


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_the_table_has_the_chains_of_kube_proxy() -> None:
    found = chains(render((), NodePlan(), SETTINGS, [Family.IPV4]))
    assert found == {name: lines(text) for name, text in CHAINS.items()}


def test_addresses_of_service_cidrs_that_no_service_has_are_dropped_after_unused_ports() -> None:
    """cluster-ips-check of kube-proxy 1.36."""
    cidrs = frozenset(map(parse_network, ("10.96.0.0/12", "10.1.0.0/24", "fd00::/112")))
    comment = 'fib daddr type != local drop comment "Drop traffic to unallocated ClusterIPs"'
    found = render((), NodePlan(service_cidrs=cidrs), SETTINGS)
    for family, networks in (
        (Family.IPV4, ["ip daddr 10.1.0.0/24", "ip daddr 10.96.0.0/12"]),
        (Family.IPV6, ["ip6 daddr fd00::/112"]),
    ):
        entry = found[Chain(family, "cluster-ips-check")]
        assert isinstance(entry, ChainEntry)
        rejecting, *dropping = map(str, entry.rules)
        assert "@cluster-ips fib daddr type != local reject" in rejecting
        assert dropping == [f"{network} {comment}" for network in networks]


def test_the_table_has_the_containers_of_kube_proxy() -> None:
    entries = render((), NodePlan(), SETTINGS, [Family.IPV4])
    found = {f"{key.kind} {key.name}": entry for key, entry in entries.items() if isinstance(key, Set | Map)}
    assert found == CONTAINERS


def test_the_table_of_ipv6_differs_only_in_the_words_of_its_family() -> None:
    four, six = (text_of(render((), NodePlan(), SETTINGS, [family])) for family in Family)
    translated = (
        four.replace("ip daddr", "ip6 daddr")
        .replace("ip saddr", "ip6 saddr")
        .replace("ipv4_addr", "ipv6_addr")
        .replace("127.0.0.0/8", "::1")
        .replace(repr(Family.IPV4), repr(Family.IPV6))
    )
    assert SAME_BYTES.sub("", translated) == SAME_BYTES.sub("", six)
    assert [len(SAME_BYTES.findall(text)) for text in (four, six)] == [4, 16]


SAME_BYTES = re.compile(r"@nh,[0-9]+,8 \. @nh,[0-9]+,8 @equal-bytes ")


def text_of(entries: dict[Key, Entry]) -> str:
    return str(list(entries.items()))


def test_without_families_there_are_no_entries() -> None:
    assert render((), NodePlan(), SETTINGS, []) == {}


@pytest.mark.parametrize(("bit", "mark"), [(0, "0x00000001"), (14, "0x00004000"), (31, "0x80000000")])
def test_one_bit_of_the_mark_requests_masquerading(bit: int, mark: str) -> None:
    found = chains(render((), NodePlan(), NftablesSettings(bit), [Family.IPV4]))
    assert found["mark-for-masquerade"] == [f"meta mark set meta mark | {mark}"]
    masquerade = f"meta mark & {mark} != 0x00000000 meta mark set meta mark ^ {mark} masquerade fully-random"
    assert found["masquerading"][0] == masquerade


NODE_PORT = "meta l4proto . th dport vmap @service-nodeports"
NO_ENDPOINT = "meta l4proto . th dport vmap @no-endpoint-nodeports"


def restricted(*texts: str) -> dict[Key, Entry]:
    networks = frozenset(map(parse_network, texts))
    return render((), NodePlan(networks, networks, (), frozenset()), SETTINGS, [Family.IPV4])


def elements(entries: dict[Key, Entry], container: str) -> list[str]:
    return [key.key for key in entries if isinstance(key, Element) and key.container == container]


def test_node_ports_answer_on_the_addresses_that_the_plan_names() -> None:
    entries = restricted("192.0.2.10/32", "127.0.0.0/8", "127.0.0.1/32", "::1/128", "2001:db8::1/128")
    assert elements(entries, "nodeport-ips") == ["192.0.2.10"]
    assert entries[Set(Family.IPV4, "nodeport-ips")] == "type ipv4_addr;"
    assert chains(entries)["services"][1:] == [f"ip daddr @nodeport-ips {NODE_PORT}"]
    assert chains(entries)["nodeport-endpoints-check"] == [f"ip daddr @nodeport-ips {NO_ENDPOINT}"]
    assert Set(Family.IPV4, "nodeport-networks") not in entries


def test_udp_and_sctp_are_rejected_and_counted_at_one_address_of_loopback() -> None:
    node = NodePlan(node_ports_everywhere=frozenset())
    entries = render((), node, NftablesSettings(localhost=frozenset({Family.IPV6})))
    found = chains({key: entry for key, entry in entries.items() if key.family is Family.IPV6})
    assert found["nodeport-endpoints-check"][1:] == [
        "ip6 daddr ::1 meta l4proto . th dport vmap @localhost-nodeports"
    ]
    for protocol in ("udp", "sctp"):
        assert found[f"localhost-nodeport-rejected-{protocol}"] == ["counter reject"]
    assert Map(Family.IPV6, "localhost-nodeports") in entries
    assert Map(Family.IPV4, "localhost-nodeports") not in entries


NOT_LOOPBACK = tuple(
    map(str, ipaddress.IPv4Network("0.0.0.0/1").address_exclude(ipaddress.IPv4Network("127.0.0.0/8")))
)
ONE_FORM = [
    [("192.0.2.10/32", "192.0.2.11/32"), ("192.0.2.10/31",), ("192.0.2.10/31", "192.0.2.11/32")],
    [("198.51.100.0/24",), ("198.51.100.0/25", "198.51.100.128/25"), ("198.51.100.0/24", "198.51.100.7/32")],
    [("0.0.0.0/1",), ("0.0.0.0/1", "127.0.0.1/32"), ("0.0.0.0/1", "127.0.0.0/9"), NOT_LOOPBACK],
    [(), ("127.0.0.0/8",), ("127.0.0.1/32", "127.0.0.2/32")],
]


@pytest.mark.parametrize("equivalent", ONE_FORM, ids=["short", "long", "around loopback", "loopback"])
def test_the_same_addresses_have_one_form(equivalent: list[tuple[str, ...]]) -> None:
    """A change of the form alone would be a change of the table."""
    forms = [restricted(*texts) for texts in equivalent]
    assert all(form == forms[0] for form in forms)
    assert not any(
        "127." in text
        for name in ("nodeport-ips", "nodeport-networks")
        for text in elements(forms[0], name)
        if not text.startswith("0.")
    )


def test_local_networks_with_many_addresses_have_a_separate_set() -> None:
    entries = restricted("192.0.2.10/32", "198.51.100.0/24", "198.51.100.0/25", "198.51.101.0/24")
    assert elements(entries, "nodeport-ips") == ["192.0.2.10"]
    assert elements(entries, "nodeport-networks") == ["198.51.100.0/23"]
    assert entries[Set(Family.IPV4, "nodeport-networks")] == "type ipv4_addr; flags interval;"
    sets = ("nodeport-ips", "nodeport-networks")
    assert chains(entries)["services"][1:] == [f"ip daddr @{name} {NODE_PORT}" for name in sets]
    assert chains(entries)["nodeport-endpoints-check"] == [f"ip daddr @{name} {NO_ENDPOINT}" for name in sets]


def test_without_addresses_for_node_ports_the_set_is_empty() -> None:
    entries = restricted()
    assert elements(entries, "nodeport-ips") == []
    assert chains(entries)["services"][1:] == [f"ip daddr @nodeport-ips {NODE_PORT}"]
