"""Parses the output of iptables-save into entries, and into the other state that a change requires. Pure.

A table of 10 000 Services with 10 endpoints each has 430 000 lines. So each line is processed once, and only
lines in shared and built-in chains a second time.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.backends.xtables.entries import Chain, Entry, Key, Rule, RulePosition, SharedChain, canonical
from ebpfproxy.backends.xtables.layout import Layout, TableAndName
from ebpfproxy.model.address import Family

TWICE = ()
"""The entry of a rule that is more than once in its chain, which no plan renders."""

BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")


class TableState(NamedTuple):
    """The state of the tables of one family that is not in the entries.

    - `shared`: the existing shared chains.
    - `copies`: how often each own rule is in its chain, for shared and built-in chains.
    - `foreign`: for an own chain, a rule of another program that is in it or jumps to it.
    """

    shared: set[SharedChain]
    copies: dict[Rule, int]
    foreign: dict[Key, str]


def parse(family: Family, printed: str, layout: Layout) -> tuple[dict[Key, Entry], TableState]:
    """Return the entries of one family, and the remaining state. Both are empty if the text is empty.

    A rule that must be the last of its chain but is not gets the position ANYWHERE, so that it is written
    again.
    """
    entries: dict[Key, Entry] = {}
    state = TableState(set(), {}, {})
    for (table, name), rules in chains_of(printed).items():
        key = layout.chain_key(family, table, name)
        if isinstance(key, Chain):
            entries[key] = tuple(rules)
            continue
        if key:
            entries[key] = ()
            state.shared.add(key)
        positions = (
            _positions(rules, layout.last.get((table, name))) if key else [RulePosition.FIRST] * len(rules)
        )
        for text, position in zip(rules, positions, strict=True):
            rule = Rule(family, table, name, text)
            if (key or name in BUILT_IN) and layout.is_own(rule):
                entries[rule] = TWICE if rule in entries else position
                state.copies[rule] = state.copies.get(rule, 0) + 1
            else:
                state.foreign.update(dict.fromkeys(_own_chains(rule, layout), f"-A {name} {text}"))
    return entries, state


def target_chain(text: str) -> str:
    """Return the chain that a rule jumps to; another word if it does not jump."""
    return text.rpartition(" ")[2]


def chains_of(printed: str) -> dict[TableAndName, list[str]]:
    """Return the rules of each chain that iptables-save printed, by table and name, in order, in canonical
    form.
    """
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


def _positions(rules: list[str], must_be_last: Callable[[str], bool] | None) -> Iterable[RulePosition]:
    """Return LAST for rules that must be last and are, ANYWHERE for all others; see `Layout.last`."""
    last = len(rules)
    while must_be_last and last and must_be_last(rules[last - 1]):
        last -= 1
    return [RulePosition.ANYWHERE] * last + [RulePosition.LAST] * (len(rules) - last)


def _own_chains(rule: Rule, layout: Layout) -> Iterator[Key]:
    """Yield the own chains that a foreign rule is in or jumps to."""
    for name in (rule.chain, target_chain(rule.text)):
        key = layout.chain_key(rule.family, rule.table, name)
        if key:
            yield key
