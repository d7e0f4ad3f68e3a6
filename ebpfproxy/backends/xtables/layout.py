"""Which chains of iptables are a mode's own, and what in them. Pure."""

import dataclasses
from collections.abc import Mapping

from ebpfproxy.backends.xtables.entries import NAT, Chain, Rule, SharedChain
from ebpfproxy.model.address import Family

TableAndName = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Layout:
    """`shared` and `whole`: the chains that are a `SharedChain` or a `Chain` each; no chain is both.
    `service_prefixes`: how the names of other whole chains begin, in the table nat.

    `jump_targets`: which chains built-in ones jump to, by table, in the order in which the jumps are
    prepended. `last`: of shared chains, the one that the rules which must come last in them lead to.
    `partly`: shared chains that others write in, too, with the rules in them that are ours.
    """

    shared: frozenset[TableAndName]
    whole: frozenset[TableAndName]
    jump_targets: Mapping[str, tuple[str, ...]]
    service_prefixes: tuple[str, ...] = ()
    last: Mapping[TableAndName, str] = dataclasses.field(default_factory=dict)
    partly: Mapping[TableAndName, frozenset[str]] = dataclasses.field(default_factory=dict)

    def chain_key(self, family: Family, table: str, name: str) -> Chain | SharedChain | None:
        """The key of a chain of the kernel; None for one that is not ours, as those of the kubelet."""
        if (table, name) in self.shared:
            return SharedChain(family, table, name)
        if (table, name) in self.whole or self.is_of_service(table, name):
            return Chain(family, table, name)
        return None

    def is_of_service(self, table: str, name: str) -> bool:
        """Whether a chain belongs to a Service, and not to the node."""
        return table == NAT and bool(self.service_prefixes) and name.startswith(self.service_prefixes)

    def is_own(self, rule: Rule) -> bool:
        """Whether a rule of the kernel, in a shared or a built-in chain, is an entry of ours.

        In a built-in chain that is any jump to a chain of ours, of whatever wording: what another version of
        kube-proxy wrote goes when ours are in force.
        """
        place = rule.table, rule.chain
        if place in self.partly:
            return rule.text in self.partly[place]
        if place in self.shared or place in self.whole:
            return True
        return jump_target(rule) in self.jump_targets.get(rule.table, ())

    def prepend_order(self, jump: Rule) -> int:
        """Sort jumps by this before they are prepended one by one."""
        return self.jump_targets[jump.table].index(jump_target(jump))


def jump_target(rule: Rule) -> str:
    """What a rule jumps to, "" where it does not jump."""
    return rule.text.rpartition("-j ")[2]
