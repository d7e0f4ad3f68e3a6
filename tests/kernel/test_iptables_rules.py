"""The rules of every golden case, written and read with the tools of both backends.

The tools print exactly the rendered rules, so that the agent can compare them with the desired state.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping

import pytest

from ebpfproxy.backends.iptables import packet_counters
from ebpfproxy.backends.iptables.chains import LAYOUT
from ebpfproxy.backends.iptables.entries import (
    FILTER,
    MANGLE,
    NAT,
    Chain,
    Entry,
    Key,
    Rule,
    RulePosition,
    SharedChain,
    canonical,
)
from ebpfproxy.backends.iptables.rules import IptablesSettings, node_entries, one_of
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan
from tests.golden.iptables_text import entries_of
from tests.golden.situation import load, situations
from tests.support.iptables_walk import ruleset
from tests.support.missing import skip_or_fail
from tests.support.namespace import namespace

pytestmark = pytest.mark.kernel

V4 = Family.IPV4
TOOL_BACKENDS = ("legacy", "nft")
PREFIX = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
TABLES = (FILTER, NAT, MANGLE)

Rules = Mapping[tuple[str, str], list[str]]
"""Rules by table and chain; of built-in chains only the agent's rules."""

_SAVED = re.compile(r"\*(?P<table>\S+)|:(?P<chain>\S+) .*|-A (?P<of>\S+) ?(?P<text>.*)")


@pytest.fixture(params=TOOL_BACKENDS)
def tool_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The calling thread is in a new namespace, so that each backend starts without rules."""
    with namespace("rules") as made, made.entered():
        packet_counters.prepare(V4)
        yield str(request.param)


def tool(tool_backend: str, family: Family, action: str, text: str = "") -> str:
    """Run the tool's save or restore; its output."""
    options = ["-w", "--noflush"] if action == "restore" else []
    command = [f"{PREFIX[family]}-{tool_backend}-{action}", *options]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(entries: Mapping[Key, Entry]) -> str:
    """The input of restore: all chains first, jumps prepended in their order."""
    lines = []
    for table in TABLES:
        keys = [key for key in entries if key.table == table]
        lines.append(f"*{table}")
        lines += [f":{key.name} - [0:0]" for key in keys if isinstance(key, Chain | SharedChain)]
        rules = sorted((key for key in keys if isinstance(key, Rule)), key=lambda key: position(entries[key]))
        jumps = [key for key in rules if entries[key] is RulePosition.FIRST]
        lines += [f"-I {jump.chain} {jump.text}" for jump in sorted(jumps, key=LAYOUT.prepend_order)]
        lines += [f"-A {rule.chain} {rule.text}" for rule in rules if entries[rule] is not RulePosition.FIRST]
        for key in keys:
            if isinstance(key, Chain):
                lines += [f"-A {key.name} {text}" for text in chain_rules(entries[key])]
        lines.append("COMMIT")
    return "\n".join(lines) + "\n"


def saved(printed: str, family: Family) -> tuple[set[Key], Rules]:
    """The agent's chains and rules."""
    chains: set[Key] = set()
    rules: dict[tuple[str, str], list[str]] = {}
    table = ""
    for line in printed.splitlines():
        found = _SAVED.fullmatch(line)
        if not found:
            continue
        table = found["table"] or table
        if found["chain"] and (key := LAYOUT.chain_key(family, table, found["chain"])):
            chains.add(key)
        if found["of"]:
            rule = Rule(family, table, found["of"], canonical(found["text"]))
            if isinstance(LAYOUT.chain_key(family, table, rule.chain), Chain) or LAYOUT.is_own(rule):
                rules.setdefault((table, rule.chain), []).append(rule.text)
    return chains, rules


def wanted(entries: Mapping[Key, Entry]) -> Rules:
    """The rules among the entries, in their resulting order."""
    return {chain: rules for chain, rules in ruleset(entries).items() if rules}


def position(entry: Entry) -> RulePosition:
    assert isinstance(entry, RulePosition)
    return entry


def chain_rules(entry: Entry) -> tuple[str, ...]:
    assert isinstance(entry, tuple)
    return entry


def round_trip(tool_backend: str, family: Family, entries: Mapping[Key, Entry]) -> tuple[set[Key], Rules]:
    tool(tool_backend, family, "restore", written(entries))
    return saved(tool(tool_backend, family, "save"), family)


@pytest.mark.parametrize("case", situations())
def test_the_tools_print_the_rendered_rules(case: str, tool_backend: str) -> None:
    situation = load(case)
    if situation.counts_packets and not packet_counters.exist():
        skip_or_fail("the kernel has no nfacct")
    for family in Family:
        entries = entries_of(situation, family)
        chains, rules = round_trip(tool_backend, family, entries)
        assert chains == {key for key in entries if not isinstance(key, Rule)}
        assert rules == wanted(entries)


@pytest.mark.parametrize(
    "settings",
    [
        IptablesSettings(masquerade_bit=0),
        IptablesSettings(masquerade_bit=31),
        IptablesSettings(tcp_be_liberal=True),
    ],
    ids=["bit 0", "bit 31", "liberal"],
)
def test_the_tools_print_the_rendered_rules_with_other_settings(
    settings: IptablesSettings, tool_backend: str
) -> None:
    for family in Family:
        entries = node_entries(NodePlan(), family, settings)
        assert round_trip(tool_backend, family, entries)[1] == wanted(entries)


def test_the_tools_print_the_rendered_probabilities(tool_backend: str) -> None:
    chain = Chain(V4, NAT, "KUBE-SVC-XPGD46QRK7WJZT7O")
    entries: dict[Key, Entry] = {
        chain: tuple(one_of(count) for count in (*range(2, 300), 1000, 5000, 100001))
    }
    assert round_trip(tool_backend, V4, entries)[1] == wanted(entries)


KUBE_PROXYS_SPELLING = """\
*filter
:KUBE-FIREWALL - [0:0]
-A KUBE-FIREWALL -m comment --comment "block incoming localnet connections" -d 127.0.0.0/8 ! -s 127.0.0.0/8 \
-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
COMMIT
*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SEP-LAE4CYYNBDVVQRFA - [0:0]
:KUBE-SEP-QLJKHGVHULZQMSXA - [0:0]
:KUBE-SVC-LOLE4ISW44XBNF3G - [0:0]
-A KUBE-MARK-MASQ -j MARK --or-mark 0x00004000
-A KUBE-POSTROUTING -m mark ! --mark 0x00004000/0x00004000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x00004000
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" \
-j MASQUERADE --random-fully
-A KUBE-SERVICES -m comment --comment "default/web cluster IP" -m tcp -p tcp -d 10.96.0.10 --dport 80 \
-j KUBE-SVC-LOLE4ISW44XBNF3G
-A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "default/web cluster IP" -m tcp -p tcp -d 10.96.0.10 \
--dport 80 ! -s 10.1.0.0/16 -j KUBE-MARK-MASQ
-A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "default/web -> 10.1.0.1:8080" -m recent \
--name KUBE-SEP-LAE4CYYNBDVVQRFA --rcheck --seconds 600 --reap -j KUBE-SEP-LAE4CYYNBDVVQRFA
-A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "default/web -> 10.1.0.2:8080" -m recent \
--name KUBE-SEP-QLJKHGVHULZQMSXA --rcheck --seconds 600 --reap -j KUBE-SEP-QLJKHGVHULZQMSXA
-A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "default/web -> 10.1.0.1:8080" -m statistic --mode random \
--probability 0.5000000000 -j KUBE-SEP-LAE4CYYNBDVVQRFA
-A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "default/web -> 10.1.0.2:8080" -j KUBE-SEP-QLJKHGVHULZQMSXA
-A KUBE-SEP-LAE4CYYNBDVVQRFA -m comment --comment default/web -s 10.1.0.1 -j KUBE-MARK-MASQ
-A KUBE-SEP-LAE4CYYNBDVVQRFA -m comment --comment default/web -m recent --name KUBE-SEP-LAE4CYYNBDVVQRFA \
--set -m tcp -p tcp -j DNAT --to-destination 10.1.0.1:8080
COMMIT
"""
"""kube-proxy's rules for the Service default/web of the case session_affinity, with its order of options."""


def test_kube_proxys_rules_equal_the_rendered_rules(tool_backend: str) -> None:
    """So none of them is rewritten at a takeover."""
    tool(tool_backend, V4, "restore", KUBE_PROXYS_SPELLING)
    _, captured = saved(tool(tool_backend, V4, "save"), V4)
    rendered = wanted(entries_of(load("session_affinity"), V4))
    assert len(captured) == 6
    for (table, chain), rules in captured.items():
        if chain == "KUBE-SERVICES":
            assert set(rules) <= set(rendered[table, chain])
        else:
            assert rules == rendered[table, chain]


def test_foreign_rules_are_not_attributed_to_the_agent(tool_backend: str) -> None:
    """Rules of the kubelet, of a container runtime, of an administrator."""
    foreign = (
        "*filter\n:KUBE-FIREWALL - [0:0]\n:DOCKER - [0:0]\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n"
        "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP\n-A FORWARD -j DOCKER\nCOMMIT\n"
        "*nat\n:KUBE-KUBELET-CANARY - [0:0]\n"
        "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\nCOMMIT\n"
    )
    tool(tool_backend, V4, "restore", foreign)
    chains, rules = saved(tool(tool_backend, V4, "save"), V4)
    assert chains == {SharedChain(V4, FILTER, "KUBE-FIREWALL")}
    assert rules == {}
