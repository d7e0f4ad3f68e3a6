"""What iptables-save printed, as entries, and what else has to be known to change them. Pure.

A table of 10 000 Services with 10 endpoints each is 430 000 lines, so each line is looked at once, and only
what is in shared and built-in chains a second time.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.backends.xtables.entries import Chain, Entry, Key, Rule, RulePosition, SharedChain, canonical
from ebpfproxy.backends.xtables.layout import Layout, TableAndName
from ebpfproxy.model.address import Family

TWICE = ()
"""The entry of a rule that is in its chain more than once, which is never wanted."""

BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")


class Held(NamedTuple):
    """What stands in the tables of a family beside the entries.

    `shared`: the shared chains that are there. `copies`: how often each of our rules is in its chain, shared
    and built-in ones. `foreign`: by chains of ours, a rule of another program that is in it, or leads to it.
    """

    shared: set[SharedChain]
    copies: dict[Rule, int]
    foreign: dict[Key, str]


def parse(family: Family, printed: str, layout: Layout) -> tuple[dict[Key, Entry], Held]:
    """The entries of one family, and what else there is. Of an empty text there are none.

    A rule that has to be the last of its chain, but is not, has the place ANYWHERE: so it is put again.
    """
    entries: dict[Key, Entry] = {}
    held = Held(set(), {}, {})
    for (table, name), rules in chains_of(printed).items():
        key = layout.chain_key(family, table, name)
        if isinstance(key, Chain):
            entries[key] = tuple(rules)
            continue
        if key:
            entries[key] = ()
            held.shared.add(key)
        places = _places(rules, layout.last.get((table, name))) if key else [RulePosition.FIRST] * len(rules)
        for text, place in zip(rules, places, strict=True):
            rule = Rule(family, table, name, text)
            if (key or name in BUILT_IN) and layout.is_own(rule):
                entries[rule] = TWICE if rule in entries else place
                held.copies[rule] = held.copies.get(rule, 0) + 1
            else:
                held.foreign.update(dict.fromkeys(_ours_by(rule, layout), f"-A {name} {text}"))
    return entries, held


def leads_to(text: str) -> str:
    """The chain that a rule leads to; another word where it leads to none."""
    return text.rpartition(" ")[2]


def chains_of(printed: str) -> dict[TableAndName, list[str]]:
    """By table and name, the rules of each chain that iptables-save printed, in order, in canonical form."""
    clean = "  " not in printed and " \n" not in printed
    chains: dict[TableAndName, list[str]] = {}
    of_table: dict[str, list[str]] = {}
    table = ""
    for line in printed.split("\n"):
        first = line[:1]
        if first == "-":
            name, _, text = line[3:].partition(" ")
            of_table[name].append(text if clean else canonical(text))
        elif first == ":":
            name = line[1 : line.index(" ")]
            chains[table, name] = of_table[name] = []
        elif first == "*":
            table, of_table = line[1:], {}
    return chains


def _places(rules: list[str], target: str | None) -> Iterable[RulePosition]:
    """LAST for rules that have to be last and are, ANYWHERE for all others.

    `target`: the chain that the rules which have to be last lead to.
    """
    last = len(rules)
    while target and last and leads_to(rules[last - 1]) == target:
        last -= 1
    return [RulePosition.ANYWHERE] * last + [RulePosition.LAST] * (len(rules) - last)


def _ours_by(rule: Rule, layout: Layout) -> Iterator[Key]:
    """Chains of ours that a foreign rule is in, or leads to."""
    for name in (rule.chain, leads_to(rule.text)):
        key = layout.chain_key(rule.family, rule.table, name)
        if key:
            yield key
