"""The entries of iptables tables, by key. Pure.

There are four kinds of entries:

- `Chain`: a chain whose rules all come from one plan, or all from the node (KUBE-POSTROUTING, KUBE-MARK-MASQ
  and KUBE-FORWARD). The entry is its rules in order. It is written as one.
- `SharedChain`: a chain that contains rules of many plans. The entry is always ``()`` and means that the
  chain exists. The node renders all of them, and no plan of a Service does. So they are created before their
  rules and before the jumps to them.
- `Rule` in a shared chain: the entry is its `RulePosition`.
- `Rule` in a built-in chain that jumps to one of the mode's chains: the entry is RulePosition.FIRST.

Keys of different kinds are never equal, although all are tuples: each chain is of one kind, and a `Rule` has
one more field. The `Layout` of a backend defines the kind of each chain, and so which kernel objects are
entries.

Rules are text in the form that ``iptables-save`` prints after "-A <chain> ". The canonical form is that of
iptables-legacy 1.8.9. iptables-nft of that version prints all rules of the agent in the same form. See
`canonical`.

A table of 10 000 Services with 10 endpoints each has 430 000 lines. So each line is processed once, and only
lines in shared and built-in chains a second time.
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import Family

FILTER, NAT, MANGLE = "filter", "nat", "mangle"


class Chain(NamedTuple):
    """A chain whose rules all belong to one plan, or to the node."""

    family: Family
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.table}, {self.family.value})"


class SharedChain(NamedTuple):
    """A chain that contains rules of many plans."""

    family: Family
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.table}, {self.family.value})"


class Rule(NamedTuple):
    """One rule in a shared or built-in chain; `text` is in the canonical form."""

    family: Family
    table: str
    chain: str
    text: str

    def __str__(self) -> str:
        return f"-A {self.chain} {self.text} ({self.table}, {self.family.value})"


class RulePosition(enum.IntEnum):
    """The position of a rule in its chain. Rules with the same position have no required order.

    - FIRST: for jumps. Missing ones are prepended in the order of `prepend_order`, as kube-proxy does, so the
      one with the highest order ends up first.
    - LAST: after all rules of the chain with another position.
    """

    FIRST = 0
    ANYWHERE = 1
    LAST = 2


Key = Chain | SharedChain | Rule
Entry = tuple[str, ...] | RulePosition
"""The rules of a Chain in order, ``()`` for a SharedChain, the RulePosition of a Rule."""

_QUOTED_OR_BLANKS = re.compile(r'("(?:[^"\\]|\\.)*")| +')


def canonical(printed: str) -> str:
    """Return the canonical form of a rule that ``iptables-save`` of either backend printed after "-A <chain>
    ".

    Only blanks can differ: old versions print one at the end, and some matches print two in a row. Blanks
    within quotes stay.

    >>> canonical('-p tcp -m comment --comment "a  b" -m nfacct --nfacct-name  x -j DROP ')
    '-p tcp -m comment --comment "a  b" -m nfacct --nfacct-name x -j DROP'
    """
    if "  " not in printed and not printed.endswith(" "):
        return printed
    return _QUOTED_OR_BLANKS.sub(lambda found: found[1] or " ", printed).strip(" ")


TableAndName = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The chains and rules of a mode.

    - `shared`, `exclusive`: the chains whose keys are a `SharedChain` or a `Chain`. No chain is in both.
    - `service_prefixes`: how the names of other exclusive chains in the table nat begin.
    - `jump_targets`: the chains that built-in chains jump to, by table, in the order in which the jumps are
      prepended.
    - `last`: for a shared chain, returns whether a rule, given as text, must come after all for which it
      returns False.
    - `partly_owned`: shared chains that other programs also write to, with the mode's own rules in them.
    """

    shared: frozenset[TableAndName]
    exclusive: frozenset[TableAndName]
    jump_targets: Mapping[str, tuple[str, ...]]
    service_prefixes: tuple[str, ...] = ()
    last: Mapping[TableAndName, Callable[[str], bool]] = dataclasses.field(default_factory=dict)
    partly_owned: Mapping[TableAndName, frozenset[str]] = dataclasses.field(default_factory=dict)

    def chain_key(self, family: Family, table: str, name: str) -> Chain | SharedChain | None:
        """Return the key of a chain; None for a chain of another program, for example the kubelet's."""
        if (table, name) in self.shared:
            return SharedChain(family, table, name)
        if (table, name) in self.exclusive or self.is_of_service(table, name):
            return Chain(family, table, name)
        return None

    def is_of_service(self, table: str, name: str) -> bool:
        """Return whether a chain belongs to a Service instead of the node."""
        return table == NAT and bool(self.service_prefixes) and name.startswith(self.service_prefixes)

    def is_own(self, rule: Rule) -> bool:
        """Return whether a rule of the kernel, in a shared or built-in chain, is an entry of the mode.

        In a built-in chain, this is any jump to one of the mode's chains, in any wording. So the jumps of
        another version of kube-proxy are removed when the agent's own are in force.
        """
        chain = rule.table, rule.chain
        if chain in self.partly_owned:
            return rule.text in self.partly_owned[chain]
        if chain in self.shared or chain in self.exclusive:
            return True
        return jump_target(rule) in self.jump_targets.get(rule.table, ())

    def prepend_order(self, jump: Rule) -> int:
        """Return the sort key of a jump. Jumps are sorted by it before they are prepended one by one."""
        return self.jump_targets[jump.table].index(jump_target(jump))


def jump_target(rule: Rule) -> str:
    """Return the chain or target that a rule jumps to, "" if it does not jump."""
    return rule.text.rpartition("-j ")[2]


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
