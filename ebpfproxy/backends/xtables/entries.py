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
"""

import enum
import re
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
