"""What the iptables dataplane holds, by key. Pure.

There are four kinds of entries:

- A chain whose rules all come from one plan (KUBE-SVC, KUBE-SVL, KUBE-EXT, KUBE-FW and KUBE-SEP chains of a
  Service), or all from the node (KUBE-POSTROUTING, KUBE-MARK-MASQ, KUBE-FORWARD, the canaries), is one entry:
  key `Chain`, its rules in order. It changes as one.
- A chain that many plans have rules in (`SHARED_CHAINS`) has the key `SharedChain`; its entry is always
  ``()`` and says that the chain is there. The node renders all of them, so they can be made before any rule
  in them and before any jump to them; no plan of a Service does.
- Each rule in a shared chain is an entry by itself: key `Rule`, its `Place`.
- Each jump from a built-in chain to one of ours, likewise, with the Place FIRST.

No two keys of different kinds are equal, though they are tuples: no chain is of both kinds, and a `Rule` has
a field more. `chain_key` and `is_ours` tell what in the kernel is an entry of ours at all.

Rules are text, as ``iptables-save`` prints them behind "-A <chain> ". The canonical form is that of
iptables-legacy 1.8.9; iptables-nft of that version prints all our rules alike. See `canonical`.
"""

import enum
import re
from typing import NamedTuple

from ebpfproxy.dataplanes.iptables import names
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


class Place(enum.IntEnum):
    """Where in its chain a rule stands. The order of those with the same place is of no matter to packets.

    FIRST is for jumps: what is missing is prepended, in the order of `prepend_order`, as kube-proxy does,
    so the one with the highest comes to stand first. LAST is behind everything else in the chain.
    """

    FIRST = 0
    ANYWHERE = 1
    LAST = 2


Key = Chain | SharedChain | Rule
Entry = tuple[str, ...] | Place
"""For a Chain its rules in order, for a SharedChain ``()``, for a Rule its Place."""

SHARED_CHAINS = (
    (FILTER, names.EXTERNAL_SERVICES),
    (FILTER, names.NODE_PORTS),
    (FILTER, names.SERVICES),
    (FILTER, names.PROXY_FIREWALL),
    (FILTER, names.FIREWALL),
    (NAT, names.SERVICES),
    (NAT, names.NODE_PORTS),
)
"""Table and name of every shared chain."""

NODE_CHAINS = (
    (FILTER, names.FORWARD),
    (NAT, names.POSTROUTING),
    (NAT, names.MARK_MASQ),
    (MANGLE, names.CANARY),
    (NAT, names.CANARY),
    (FILTER, names.CANARY),
)
"""Table and name of every chain whose rules all come from the node."""

JUMP_TARGETS = {
    FILTER: (
        names.EXTERNAL_SERVICES,
        names.NODE_PORTS,
        names.SERVICES,
        names.FORWARD,
        names.PROXY_FIREWALL,
        names.FIREWALL,
    ),
    NAT: (names.SERVICES, names.POSTROUTING),
}
"""Which chains built-in ones jump to, by table, in the order in which kube-proxy prepends the jumps."""

LOCALNET_GUARD = (
    "! -s 127.0.0.0/8 -d 127.0.0.0/8"
    ' -m comment --comment "block incoming localnet connections"'
    " -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)
"""The rule in KUBE-FIREWALL, IPv4 alone, that has to be in force before route_localnet is turned on:
otherwise neighbours reach what listens on 127.0.0.1 only (CVE-2020-8558). That is for where
`node_rules.answers_on_loopback` says so; the guard is there anyway."""

_KINDS: dict[tuple[str, str], type[Chain] | type[SharedChain]] = {
    **dict.fromkeys(SHARED_CHAINS, SharedChain),
    **dict.fromkeys(NODE_CHAINS, Chain),
}
_BLANKS = re.compile(r'("(?:[^"\\]|\\.)*")| +')


def chain_key(family: Family, table: str, name: str) -> Chain | SharedChain | None:
    """The key of a chain of the kernel; None for one that is not ours: built-in, the kubelet's, others'."""
    kind = _KINDS.get((table, name))
    if kind is None and table == NAT and name.startswith(names.SERVICE_PREFIXES):
        kind = Chain
    return kind(family, table, name) if kind else None


def is_ours(rule: Rule) -> bool:
    """Whether a rule of the kernel, in a shared or a built-in chain, is an entry of ours.

    In a built-in chain that is any jump to a chain of ours, of whatever wording: what another version of
    kube-proxy wrote goes when ours are in force. In KUBE-FIREWALL only the guard is, which the kubelet
    writes, too, in the same words; whatever else is in there is the kubelet's.
    """
    if (rule.table, rule.chain) == (FILTER, names.FIREWALL):
        return rule.text == LOCALNET_GUARD
    if (rule.table, rule.chain) in _KINDS:
        return True
    return _jump_target(rule) in JUMP_TARGETS.get(rule.table, ())


def prepend_order(jump: Rule) -> int:
    """Sort jumps by this before they are prepended one by one."""
    return JUMP_TARGETS[jump.table].index(_jump_target(jump))


def canonical(printed: str) -> str:
    """The canonical form of a rule that ``iptables-save`` of either flavour printed behind "-A <chain> ".

    Only blanks can differ: old versions print one at the end, and some matches two in a row. Those in quotes
    stay.

    >>> canonical('-p tcp -m comment --comment "a  b" -m nfacct --nfacct-name  x -j DROP ')
    '-p tcp -m comment --comment "a  b" -m nfacct --nfacct-name x -j DROP'
    """
    if "  " not in printed and not printed.endswith(" "):
        return printed
    return _BLANKS.sub(lambda found: found[1] or " ", printed).strip(" ")


def _jump_target(rule: Rule) -> str:
    """What a rule jumps to, "" where it does not jump."""
    return rule.text.rpartition("-j ")[2]
