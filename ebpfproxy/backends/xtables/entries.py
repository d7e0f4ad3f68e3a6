"""What a backend with rules holds of iptables, by key. Pure.

There are four kinds of entries:

- A chain whose rules all come from one plan, or all from the node (KUBE-POSTROUTING, KUBE-MARK-MASQ and
  KUBE-FORWARD), is one entry: key `Chain`, its rules in order. It changes as one.
- A chain that many plans have rules in has the key `SharedChain`; its entry is always ``()`` and says that
  the chain is there. The node renders all of them, so they can be made before any rule in them and before any
  jump to them; no plan of a Service does.
- Each rule in a shared chain is an entry by itself: key `Rule`, its `RulePosition`.
- Each jump from a built-in chain to one of ours, likewise, with the RulePosition FIRST.

No two keys of different kinds are equal, though they are tuples: no chain is of both kinds, and a `Rule` has
a field more. A backend's `Layout` says which chains are of which kind, and so what in the kernel is an
entry of ours at all.

Rules are text, as ``iptables-save`` prints them behind "-A <chain> ". The canonical form is that of
iptables-legacy 1.8.9; iptables-nft of that version prints all our rules alike. See `canonical`.
"""

import enum
import re
from typing import NamedTuple

from ebpfproxy.model.address import Family

FILTER, NAT, MANGLE = "filter", "nat", "mangle"


class Chain(NamedTuple):
    """A chain that belongs to one plan, or to the node, as a whole."""

    family: Family
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.table}, {self.family.value})"


class SharedChain(NamedTuple):
    """A chain that many plans have rules in."""

    family: Family
    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.table}, {self.family.value})"


class Rule(NamedTuple):
    """One rule in a shared or in a built-in chain; `text` in the canonical form."""

    family: Family
    table: str
    chain: str
    text: str

    def __str__(self) -> str:
        return f"-A {self.chain} {self.text} ({self.table}, {self.family.value})"


class RulePosition(enum.IntEnum):
    """Where in its chain a rule stands. The order of those with the same place is of no matter to packets.

    FIRST is for jumps: what is missing is prepended, in the order of `prepend_order`, as kube-proxy does,
    so the one with the highest comes to stand first. LAST is behind everything else in the chain.
    """

    FIRST = 0
    ANYWHERE = 1
    LAST = 2


Key = Chain | SharedChain | Rule
Entry = tuple[str, ...] | RulePosition
"""For a Chain its rules in order, for a SharedChain ``()``, for a Rule its RulePosition."""

_BLANKS = re.compile(r'("(?:[^"\\]|\\.)*")| +')


def canonical(printed: str) -> str:
    """The canonical form of a rule that ``iptables-save`` of either backend printed behind "-A <chain> ".

    Only blanks can differ: old versions print one at the end, and some matches two in a row. Those in quotes
    stay.

    >>> canonical('-p tcp -m comment --comment "a  b" -m nfacct --nfacct-name  x -j DROP ')
    '-p tcp -m comment --comment "a  b" -m nfacct --nfacct-name x -j DROP'
    """
    if "  " not in printed and not printed.endswith(" "):
        return printed
    return _BLANKS.sub(lambda found: found[1] or " ", printed).strip(" ")
