"""Defines which chains and rules of iptables belong to a mode. Pure."""

import dataclasses
from collections.abc import Callable, Mapping

from ebpfproxy.backends.xtables.entries import NAT, Chain, Rule, SharedChain
from ebpfproxy.model.address import Family

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
