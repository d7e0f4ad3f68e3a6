"""Removes the chains and rules of a mode from the tables of iptables, including those of kube-proxy.

`remove` and `drain` are for mode iptables. Mode ipvs selects other chains. These objects stay on purpose:

- Built-in chains and tables, including those that iptables-nft created for the agent. The kernel translates
  open connections only as long as the table nat exists and a rule requests connection tracking (see
  `drain_chains`).
- Chains that a rule of another program jumps to, for example from a CNI plugin to KUBE-MARK-MASQ, and the
  chains that these jump to.
- KUBE-FIREWALL with its rules and the jumps to it. They also belong to the kubelet. They keep neighbors off
  127.0.0.1 while route_localnet is on, which is never reset.
- The kubelet's own chains (KUBE-IPTABLES-HINT, KUBE-KUBELET-CANARY, KUBE-MARK-DROP).
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.iptables import chains, packet_counters, probes, script
from ebpfproxy.backends.iptables.chains import LAYOUT
from ebpfproxy.backends.iptables.entries import (
    BUILT_IN,
    FILTER,
    MANGLE,
    NAT,
    Chain,
    Entry,
    Key,
    Layout,
    Rule,
    TableAndName,
    TableState,
    chains_of,
    target_chain,
)
from ebpfproxy.backends.iptables.rules import comment
from ebpfproxy.linux.xtables.iptables import Iptables, ToolBackend
from ebpfproxy.model.address import Family

Leftovers = Callable[[Mapping[TableAndName, list[str]]], set[TableAndName]]
"""Selects the chains to remove from all chains of one iptables backend and family, given with their rules."""

_CONNTRACK_CHAIN = (FILTER, chains.FORWARD)
_CONNTRACK_RULE = (
    f"{comment('what open connections need')} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
)
"""It requests connection tracking, and accepts packets of open connections as KUBE-FORWARD did, if FORWARD
drops others, for example with Docker or ufw."""
_CONNTRACK_JUMP = "FORWARD"
"""The built-in chain whose jump to the rule's chain stays as well."""

COMMON_CHAINS = frozenset(
    {
        (NAT, chains.SERVICES),
        (NAT, chains.POSTROUTING),
        (NAT, chains.MARK_MASQ),
        (FILTER, chains.FORWARD),
        (FILTER, chains.PROXY_FIREWALL),
    }
)
"""Table and name of the chains that both modes have, iptables and ipvs; see `are_of_ipvs`."""

_SET_MATCH = "--match-set KUBE-"

_NO_LAYOUT = Layout(frozenset(), frozenset(), {})


def are_of_ipvs(chains: Mapping[TableAndName, list[str]]) -> bool:
    """Return whether the chains that both modes have contain rules of mode ipvs, which match ipsets.

    So the leftovers of each mode are recognized by their rules, whichever mode serves.
    """
    return any(_SET_MATCH in text for each in COMMON_CHAINS for text in chains.get(each, ()))


def remove_chains(leftovers: Leftovers, dry_run: bool = False) -> list[str]:
    """Remove the chains of both iptables backends and families, in the calling thread's network namespace.

    Return one line for each removed object; with `dry_run`, for each object that would be removed. Empty if
    there is none, or no tool that could have created it. New connections no longer meet the removed rules.
    Translated open connections continue only if another rule requests connection tracking. Raises
    KernelError.
    """
    return [line for tool_backend in ToolBackend for line in remove_of(tool_backend, leftovers, dry_run)]


def remove_of(tool_backend: ToolBackend, leftovers: Leftovers, dry_run: bool = False) -> list[str]:
    """Do the same as `remove` for one iptables backend."""
    removed = (_remove_with(tool, leftovers, lambda: False, dry_run) for tool in _installed(tool_backend))
    return [line for lines, _ in removed for line in lines]


def any_chain_exists(chains: Collection[TableAndName]) -> bool:
    """Return whether any of these chains exists in any iptables backend and family, or the rule that `drain`
    keeps.

    This does not read complete tables, since those of the mode that serves may be long.
    """
    return any(
        _has_conntrack_rule(tool) or any(tool.show(*each) for each in chains) for tool in _all_installed()
    )


def drain_chains(leftovers: Leftovers, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """Do the same as `remove`, but keep open connections. Return the removed objects, and whether another
    call is required.

    Without any rule that requests connection tracking, the kernel unregisters its hooks and discards all NAT
    state (nf_ct_netns_put()). For kube-proxy's IPv6 rules this is the case on every host without IPv6 rules
    of its own. So one rule stays in a family as long as `translates(family)` returns that translated
    connections need it. If FORWARD jumps to KUBE-FORWARD, this jump stays, too. `translates` is called each
    time. Once the rule is not needed, the next call for any mode removes it, whichever program added it.

    Raises KernelError.
    """
    removed: list[str] = []
    again = False
    for tool in _all_installed():
        done, needs_next_call = _remove_with(tool, leftovers, functools.partial(translates, tool.family))
        removed += done
        again = again or needs_next_call
    return removed, again


def _installed(tool_backend: ToolBackend) -> list[Iptables]:
    return probes.installed().get(tool_backend, [])


def _all_installed() -> Iterator[Iptables]:
    for tools in probes.installed().values():
        yield from tools


def _has_conntrack_rule(tool: Iptables) -> bool:
    return tool.show(*_CONNTRACK_CHAIN)[1:] == [f"-A {chains.FORWARD} {_CONNTRACK_RULE}"]


def _remove_with(
    tool: Iptables, leftovers: Leftovers, must_keep: Callable[[], bool], dry_run: bool = False
) -> tuple[list[str], bool]:
    """Remove the leftovers with one tool. Return the removed objects, and whether the conntrack rule exists.

    `must_keep` is called if there are leftovers, and returns whether that rule must stay.
    """
    chains = chains_of(tool.save())
    has_conntrack_rule = chains.get(_CONNTRACK_CHAIN) == [_CONNTRACK_RULE]
    candidates = leftovers(chains) | ({_CONNTRACK_CHAIN} if has_conntrack_rule else set())
    to_remove = _unreferenced(candidates, chains)
    # Otherwise the chain is another mode's, which also requests connection tracking.
    may_add = _CONNTRACK_CHAIN not in chains or _CONNTRACK_CHAIN in to_remove
    keep = bool(to_remove) and may_add and must_keep()
    if keep and has_conntrack_rule and to_remove == {_CONNTRACK_CHAIN}:
        return [], True
    jumps = [
        Rule(tool.family, table, name, text)
        for (table, name), rules in chains.items()
        if name in BUILT_IN
        for text in rules
        if (table, target_chain(text)) in to_remove
        and not (keep and (table, target_chain(text), name) == (*_CONNTRACK_CHAIN, _CONNTRACK_JUMP))
    ]
    removed = to_remove - {_CONNTRACK_CHAIN} if keep else to_remove
    puts: dict[Key, Entry] = {Chain(tool.family, *_CONNTRACK_CHAIN): (_CONNTRACK_RULE,)} if keep else {}
    drops: list[Key] = [*jumps, *(Chain(tool.family, *each) for each in removed)]
    state = TableState(set(), Counter(jumps), {})
    block = script.block_for(tool.tool_backend)
    lines = script.compose(Delta(puts, frozenset(drops)), state, _NO_LAYOUT, block)
    if lines and not dry_run:
        tool.restore(lines.text)
    return [f"{tool} {line}" for line in _described(jumps, removed)], keep


def _unreferenced(
    leftovers: set[TableAndName], chains: Mapping[TableAndName, list[str]]
) -> set[TableAndName]:
    """Return the leftovers that no remaining chain jumps to, directly or through other chains."""
    to_remove = set(leftovers)
    unchecked = [each for each in chains if each not in to_remove and each[1] not in BUILT_IN]
    while unchecked:
        table, name = unchecked.pop()
        referenced = {(table, target_chain(text)) for text in chains[table, name]} & to_remove
        to_remove -= referenced
        unchecked += referenced
    return to_remove


def _described(jumps: list[Rule], to_remove: set[TableAndName]) -> Iterator[str]:
    yield from (f"{jump.table}: rule in {jump.chain}: {jump.text}" for jump in jumps)
    of_services = {each for each in to_remove if _is_of_service(each)}
    yield from (f"{table}: chain {name}" for table, name in sorted(to_remove - of_services))
    if of_services:
        yield f"{NAT}: chains of Services: {len(of_services)}"


def _is_of_service(chain: TableAndName) -> bool:
    table, name = chain
    return table == NAT and name.startswith(chains.SERVICE_PREFIXES)


# Mode iptables

_IPVS_CHAINS = {
    (NAT, chains.LOAD_BALANCER),
    (NAT, chains.NODE_PORT),
    (FILTER, chains.NODE_PORT),
    (FILTER, chains.SOURCE_RANGES_FIREWALL),
    (FILTER, chains.IPVS_OUT_FILTER),
    (MANGLE, chains.IPVS_OUT_FILTER),
}

_ALL_CHAINS = (LAYOUT.shared | LAYOUT.exclusive | _IPVS_CHAINS) - LAYOUT.partly_owned.keys()


def leftovers(chains: Mapping[TableAndName, list[str]]) -> set[TableAndName]:
    """Return the chains to remove, including those of mode ipvs unless that mode has rules in the common
    chains.

    KUBE-IPVS-FILTER always stays, since mode ipvs needs it as long as it has connections.
    """
    own = _ALL_CHAINS - COMMON_CHAINS - _IPVS_CHAINS if are_of_ipvs(chains) else _ALL_CHAINS
    return {each for each in chains if each in own or LAYOUT.is_of_service(*each)}


def remove(dry_run: bool = False) -> list[str]:
    """See `remove_chains`. The packet counters are removed last."""
    lines = remove_chains(leftovers, dry_run)
    return [*lines, *packet_counters.remove(bool(lines), dry_run)]


def drain(translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """See `drain_chains`. The packet counters are removed last."""
    lines, needs_next_call = drain_chains(leftovers, translates)
    return [*lines, *packet_counters.remove(bool(lines))], needs_next_call
