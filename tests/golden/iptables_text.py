"""Entries of backend iptables as text, as in `iptables-save`: those of Services, and those that depend on the
plan of the node.
"""

from collections.abc import Iterator, Mapping

from ebpfproxy.backends.iptables.entries import FILTER, NAT, Chain, Entry, Key, Rule, RulePosition
from ebpfproxy.backends.iptables.rules import IptablesSettings, node_entries
from ebpfproxy.backends.iptables.service_rules import service_entries
from ebpfproxy.model.address import Family
from tests.golden.situation import Situation, with_pods_detected_by_cidr


def entries_of(situation: Situation, family: Family) -> dict[Key, Entry]:
    """All entries of one family; Services are in the order of their names."""
    situation = with_pods_detected_by_cidr(situation)
    settings = IptablesSettings(counts_packets=situation.counts_packets)
    entries = node_entries(situation.node_plan, family, settings)
    for plan in situation.plans:
        if plan.family is family:
            entries.update(service_entries(plan, settings.counts_localhost))
    return entries


def iptables_text(situation: Situation) -> str:
    """A block for each family and table, shared chains first.

    Entries that are the same in every case are omitted: the jumps from built-in chains, and chains that
    depend on the node alone.
    """
    omitted = _entries_of_the_node(situation)
    blocks = []
    for family in Family:
        entries = {k: e for k, e in entries_of(situation, family).items() if (k, e) not in omitted}
        for table in (FILTER, NAT):
            lines = [*_shared(entries, table), *_own(entries, table)]
            if lines:
                blocks.append("\n".join([f"{family.value} {table}", *lines]))
    return "\n\n".join(blocks) + "\n"


def _entries_of_the_node(situation: Situation) -> set[tuple[Key, Entry]]:
    """The entries that depend on the node alone, without counters, except rules that jump to NodePorts."""
    node = (node_entries(situation.node_plan, family, IptablesSettings()) for family in Family)
    return {each for entries in node for each in entries.items() if each[1] is not RulePosition.LAST}


def _shared(entries: Mapping[Key, Entry], table: str) -> Iterator[str]:
    """Rules in chains that Services share, sorted by chain; the last rule of a chain stays the last."""
    rules = [key for key in entries if isinstance(key, Rule) and key.table == table]
    for rule in sorted(rules, key=lambda rule: (rule.chain, entries[rule])):
        yield f"-A {rule.chain} {rule.text}"


def _own(entries: Mapping[Key, Entry], table: str) -> Iterator[str]:
    """Rules in chains that belong to one ServicePort or endpoint."""
    for key, rules in entries.items():
        if isinstance(key, Chain) and key.table == table and isinstance(rules, tuple):
            yield from (f"-A {key.name} {text}" for text in rules)
