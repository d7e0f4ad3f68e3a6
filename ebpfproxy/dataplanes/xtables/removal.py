"""Removing what a mode left in the tables of iptables, be it kube-proxy's.

Whoever removes says which chains those are. What stays on purpose:

- built-in chains and tables, also those that iptables-nft made for us: the kernel goes on translating what is
  open only as long as the table nat is there;
- a chain that a rule of somebody else leads to, such as that of a CNI plugin to KUBE-MARK-MASQ, and what that
  chain leads to.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from ebpfproxy.dataplanes.interface import Delta
from ebpfproxy.dataplanes.xtables import flavours, names, script
from ebpfproxy.dataplanes.xtables.entries import FILTER, NAT, Chain, Key, Rule
from ebpfproxy.dataplanes.xtables.layout import Layout, TableAndName
from ebpfproxy.dataplanes.xtables.saved import BUILT_IN, Held, chains_of, leads_to
from ebpfproxy.kernel.iptables import Flavour, Iptables

Leftovers = Callable[[Mapping[TableAndName, list[str]]], set[TableAndName]]
"""Out of the chains of one flavour and family, with their rules: those to be removed."""

COMMON_CHAINS = frozenset(
    {
        (NAT, names.SERVICES),
        (NAT, names.POSTROUTING),
        (NAT, names.MARK_MASQ),
        (FILTER, names.FORWARD),
        (FILTER, names.PROXY_FIREWALL),
    }
)
"""Table and name of those that both the modes iptables and ipvs have; see `are_of_ipvs`."""

_MATCHES_A_SET = "--match-set KUBE-"

_NOTHING_PUT = Layout(frozenset(), frozenset(), {})


def are_of_ipvs(chains: Mapping[TableAndName, list[str]]) -> bool:
    """Whether the chains that both modes have hold rules of the mode ipvs: those match ipsets.

    So each mode's leftovers are known by what stands there, whichever mode serves.
    """
    return any(_MATCHES_A_SET in text for each in COMMON_CHAINS for text in chains.get(each, ()))


def remove(leftovers: Leftovers, dry_run: bool = False) -> list[str]:
    """By both flavours, for both families, in the calling thread's network namespace; what was removed, or
    with `dry_run` would be, a line each; empty where nothing was there, or no tool that could have made it.

    New connections find nothing of it afterwards; those that are open go on. Raises KernelError.
    """
    return [line for flavour in Flavour for line in remove_of(flavour, leftovers, dry_run)]


def remove_of(flavour: Flavour, leftovers: Leftovers, dry_run: bool = False) -> list[str]:
    """As `remove`, for one flavour alone."""
    tools = flavours.installed().get(flavour, ())
    return [line for tool in tools for line in _remove_by(tool, leftovers, dry_run)]


def _remove_by(tool: Iptables, leftovers: Leftovers, dry_run: bool) -> list[str]:
    chains = chains_of(tool.save())
    doomed = _without_what_stays(leftovers(chains), chains)
    jumps = [
        Rule(tool.family, table, name, text)
        for (table, name), rules in chains.items()
        if name in BUILT_IN
        for text in rules
        if (table, leads_to(text)) in doomed
    ]
    drops: list[Key] = [*jumps, *(Chain(tool.family, *each) for each in doomed)]
    held = Held(set(), Counter(jumps), {})
    block = script.block_for(tool.flavour)
    lines = script.compose(Delta({}, frozenset(drops)), held, _NOTHING_PUT, block)
    if lines and not dry_run:
        tool.restore(lines.text)
    return [f"{tool} {line}" for line in _described(jumps, doomed)]


def _without_what_stays(
    leftovers: set[TableAndName], chains: Mapping[TableAndName, list[str]]
) -> set[TableAndName]:
    """All but those that something leads to which stays."""
    doomed = set(leftovers)
    stay = [each for each in chains if each not in doomed and each[1] not in BUILT_IN]
    while stay:
        table, name = stay.pop()
        kept = {(table, leads_to(text)) for text in chains[table, name]} & doomed
        doomed -= kept
        stay += kept
    return doomed


def _described(jumps: list[Rule], doomed: set[TableAndName]) -> Iterator[str]:
    yield from (f"{jump.table}: rule in {jump.chain}: {jump.text}" for jump in jumps)
    of_services = {each for each in doomed if _is_of_service(each)}
    yield from (f"{table}: chain {name}" for table, name in sorted(doomed - of_services))
    if of_services:
        yield f"{NAT}: chains of Services: {len(of_services)}"


def _is_of_service(chain: TableAndName) -> bool:
    table, name = chain
    return table == NAT and name.startswith(names.SERVICE_PREFIXES)
