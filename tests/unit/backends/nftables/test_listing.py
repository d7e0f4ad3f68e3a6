"""The output of nft becomes the same entries for all its versions and flags."""

import pytest

from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, Element, ElementEntry, Entry, Key, Map, Set
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.model.address import Family
from tests.support.nft_listing import element_text, parse
from tests.support.nft_text import canonical_declaration, canonical_hook, canonical_rule

V4 = Family.IPV4
SERVICE = "service-ULMVA6XW-ns1/svc1/tcp/p80"
ENDPOINT = "endpoint-5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80"
AFFINITY = "affinity-5OJB2KTY-ns1/svc1/tcp/p80__10.180.0.1/80"

LISTING = f"""table ip kube-proxy {{
    comment "rules for kube-proxy"
    set cluster-ips {{
        type ipv4_addr
        comment "Active ClusterIPs"
        elements = {{ 10.96.0.1, 10.96.0.10,
                10.96.0.11 }}
    }}

    set {AFFINITY} {{
        type ipv4_addr
        size 65535
        flags dynamic,timeout
        timeout 3h
        elements = {{ 10.1.0.7 timeout 3h expires 2h59m50s }}
    }}

    map no-endpoint-services {{
        type ipv4_addr . inet_proto . inet_service : verdict
        elements = {{ 10.96.0.10 . tcp . 81 comment "ns1/svc1:a, b" : drop,
                10.96.0.10 . udp . 81 : goto reject-chain }}
    }}

    map service-nodeports {{
        type inet_proto . inet_service : verdict
    }}

    chain filter-prerouting-pre-dnat {{
        type filter hook prerouting priority dstnat - 10; policy accept;
        ct state new jump firewall-check
    }}

    chain reject-chain {{
        comment "helper for @no-endpoint-services / @no-endpoint-nodeports"
        reject
    }}

    chain {SERVICE} {{
    }}

    counter packets {{
        packets 1 bytes 2
    }}

    chain {ENDPOINT} {{
        ip saddr 10.180.0.1 jump mark-for-masquerade
        update @{AFFINITY} {{ ip saddr timeout 3h }}
        meta l4proto tcp dnat to 10.180.0.1:80
    }}
}}
""".replace("    ", "\t")


def text_rules(*texts: str) -> tuple[Rule, ...]:
    return tuple(map(Rule, texts))


ENTRIES: dict[Key, Entry] = {
    Set(V4, "cluster-ips"): "type ipv4_addr;",
    Element(V4, "cluster-ips", "10.96.0.1"): ElementEntry(),
    Element(V4, "cluster-ips", "10.96.0.10"): ElementEntry(),
    Element(V4, "cluster-ips", "10.96.0.11"): ElementEntry(),
    Set(V4, AFFINITY): "type ipv4_addr; size 65535; flags dynamic,timeout;",
    Map(V4, "no-endpoint-services"): "type ipv4_addr . inet_proto . inet_service : verdict;",
    Element(V4, "no-endpoint-services", "10.96.0.10 . tcp . 81"): ElementEntry("drop", "ns1/svc1:a, b"),
    Element(V4, "no-endpoint-services", "10.96.0.10 . udp . 81"): ElementEntry("goto reject-chain"),
    Map(V4, "service-nodeports"): "type inet_proto . inet_service : verdict;",
    Chain(V4, "filter-prerouting-pre-dnat"): ChainEntry(
        "type filter hook prerouting priority -110; policy accept;",
        text_rules("ct state new jump firewall-check"),
    ),
    Chain(V4, "reject-chain"): ChainEntry("", text_rules("reject")),
    Chain(V4, SERVICE): ChainEntry("", ()),
    Chain(V4, ENDPOINT): ChainEntry(
        "",
        text_rules(
            "ip saddr 10.180.0.1 jump mark-for-masquerade",
            f"update @{AFFINITY} {{ ip saddr timeout 10800s }}",
            "meta l4proto tcp dnat to 10.180.0.1:80",
        ),
    ),
}


def test_a_listing_becomes_entries() -> None:
    assert parse(LISTING, V4) == ENTRIES


def test_an_empty_listing_has_no_entries() -> None:
    assert parse("", V4) == {}
    assert parse("table ip kube-proxy {\n}\n", V4) == {}


def test_a_listing_of_numbers_becomes_the_same_entries() -> None:
    """The output of `nft -n`, or of any nft on a machine without /etc/protocols."""
    numeric = (
        LISTING.replace(" . tcp . ", " . 6 . ")
        .replace(" . udp . ", " . 17 . ")
        .replace("l4proto tcp", "l4proto 6")
        .replace("timeout 3h", "timeout 10800s")
        .replace("priority dstnat - 10", "priority -110")
    )
    assert numeric != LISTING
    assert parse(numeric, V4) == ENTRIES


def test_a_listing_of_a_version_that_counts_elements_becomes_the_same_entries() -> None:
    assert parse(LISTING.replace("size 65535", "size 65535\t# count 1"), V4) == ENTRIES


@pytest.mark.parametrize(
    ("element", "key", "entry"),
    [
        ("fd00::10 . tcp . 80 : goto x", "fd00::10 . tcp . 80", ElementEntry("goto x")),
        ("132 . 30080 : drop", "sctp . 30080", ElementEntry("drop")),
        ("10.1.0.0/24", "10.1.0.0/24", ElementEntry()),
        ("10.0.0.1-10.0.0.5", "10.0.0.1-10.0.0.5", ElementEntry()),
        ("10.0.0.1 timeout 1h expires 59m", "10.0.0.1", ElementEntry()),
        ('10.0.0.1 counter packets 3 bytes 9 comment "a : b"', "10.0.0.1", ElementEntry("", "a : b")),
    ],
)
def test_an_element_becomes_a_key_and_an_entry(element: str, key: str, entry: ElementEntry) -> None:
    text = f"table ip t {{\n\tset s {{\n\t\ttype x\n\t\telements = {{ {element},\n\t\t\t     z }}\n\t}}\n}}\n"
    found = parse(text, V4)
    assert found[Element(V4, "s", key)] == entry
    assert found.keys() == {Set(V4, "s"), Element(V4, "s", key), Element(V4, "s", "z")}


@pytest.mark.parametrize(
    ("printed", "canonical"),
    [
        ("ip saddr != { 64.0.0.0-255.255.255.255 } drop", "ip saddr != 64.0.0.0-255.255.255.255 drop"),
        ("ip saddr != { 0.0.0.0/0 } drop", "ip saddr != 0.0.0.0/0 drop"),
        ("ip saddr != { 10.3.0.0/16, 10.1.0.0/16 } drop", "ip saddr != { 10.1.0.0/16, 10.3.0.0/16 } drop"),
        ("ip saddr != 1.2.3.4-1.2.3.5 drop", "ip saddr != 1.2.3.4/31 drop"),
        ("ip6 saddr != { fd00::/9, fd80::/9 } drop", "ip6 saddr != fd00::/8 drop"),
        ("ip saddr != @somebody drop", "ip saddr != @somebody drop"),
        ("ip saddr != { $no, $ranges } drop", "ip saddr != { $no, $ranges } drop"),
        ("meta mark != 0x00000000/1 return", "meta mark & 0x80000000 != 0x00000000 return"),
        ("update @s { ip saddr timeout 1d }", "update @s { ip saddr timeout 86400s }"),
        ("update @s { ip saddr timeout 23h59m59s }", "update @s { ip saddr timeout 86399s }"),
        (
            "numgen random mod 3 vmap { 2 : goto c, 0 : goto a, 1 : goto b }",
            "numgen random mod 3 vmap { 0 : goto a, 1 : goto b, 2 : goto c }",
        ),
        ("numgen inc mod 2 vmap { 0-1 : drop }", "numgen inc mod 2 vmap { 0-1 : drop }"),
        (
            "meta l4proto 6 dnat ip to numgen random mod 2 map { 1 : 10.0.0.2 . 80, 0 : 10.0.0.1 . 80 }",
            "meta l4proto tcp dnat ip to numgen random mod 2 map { 0 : 10.0.0.1 . 80, 1 : 10.0.0.2 . 80 }",
        ),
        ("meta l4proto 132 dnat to 10.0.0.1:80", "meta l4proto sctp dnat to 10.0.0.1:80"),
        ("meta l4proto 61 drop", "meta l4proto 61 drop"),
    ],
)
def test_a_rule_becomes_its_canonical_form(printed: str, canonical: str) -> None:
    assert canonical_rule(printed) == canonical
    assert canonical_rule(canonical) == canonical


@pytest.mark.parametrize(
    ("printed", "number"),
    [
        ("filter", 0),
        ("srcnat", 100),
        ("dstnat", -100),
        ("dstnat + 10", -90),
        ("mangle", -150),
        ("-110", -110),
    ],
)
def test_a_named_priority_becomes_a_number(printed: str, number: int) -> None:
    text = "type nat hook output priority {}; policy accept;"
    assert canonical_hook(text.format(printed)) == text.format(number)


def test_an_unknown_priority_name_stays_unchanged() -> None:
    text = "type filter hook ingress priority whatever; policy accept;"
    assert canonical_hook(text) == text


def test_a_declaration_has_its_type_and_flags_in_one_order() -> None:
    parts = [
        "flags timeout, dynamic",
        "type ipv4_addr",
        'comment "x"',
        "policy memory",
        "timeout 1h",
        "size 9",
    ]
    assert canonical_declaration(parts) == "type ipv4_addr; size 9; flags dynamic,timeout;"


def test_an_element_is_written_as_it_is_read() -> None:
    for key, entry in ENTRIES.items():
        if isinstance(key, Element) and isinstance(entry, ElementEntry):
            text = f"\tmap {key.container} {{\n\t\telements = {{ {element_text(key, entry)} }}\n\t}}\n"
            assert parse(text, V4)[key] == entry
