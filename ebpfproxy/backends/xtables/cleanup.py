"""Removing what a mode left in the tables of iptables, be it kube-proxy's.

The caller says which chains those are. What stays on purpose:

- built-in chains and tables, also those that iptables-nft made for us: the kernel continues translating what
  is open only as long as the table nat is there, and something asks for connection tracking (see `drain`);
- a chain that a rule of another program leads to, such as that of a CNI plugin to KUBE-MARK-MASQ, and what
  that chain leads to.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.xtables import names, script, tool_backends
from ebpfproxy.backends.xtables.entries import FILTER, NAT, Chain, Entry, Key, Rule
from ebpfproxy.backends.xtables.layout import Layout, TableAndName
from ebpfproxy.backends.xtables.rule_text import comment
from ebpfproxy.backends.xtables.saved import BUILT_IN, Held, chains_of, leads_to
from ebpfproxy.linux.xtables.iptables import Iptables, ToolBackend
from ebpfproxy.model.address import Family

Leftovers = Callable[[Mapping[TableAndName, list[str]]], set[TableAndName]]
"""Out of the chains of one backend and family, with their rules: those to be removed."""

_HOLDER = (FILTER, names.FORWARD)
_HOLDING = f"{comment('what open connections need')} -m conntrack --ctstate NEW -j RETURN"
"""A rule that does nothing, in a chain that nothing leads to, and asks for connection tracking."""

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

_NO_RULE_PUT = Layout(frozenset(), frozenset(), {})


def are_of_ipvs(chains: Mapping[TableAndName, list[str]]) -> bool:
    """Whether the chains that both modes have hold rules of the mode ipvs: those match ipsets.

    So each mode's leftovers are known by what stands there, whichever mode serves.
    """
    return any(_MATCHES_A_SET in text for each in COMMON_CHAINS for text in chains.get(each, ()))


def remove(leftovers: Leftovers, dry_run: bool = False) -> list[str]:
    """By both backends, for both families, in the calling thread's network namespace; what was removed, or
    with `dry_run` would be, a line each; empty where nothing was there, or no tool that could have made it.

    New connections find nothing of it afterwards. Those that are open and were translated continue only where
    something else asks for connection tracking. Raises KernelError.
    """
    return [line for tool_backend in ToolBackend for line in remove_of(tool_backend, leftovers, dry_run)]


def remove_of(tool_backend: ToolBackend, leftovers: Leftovers, dry_run: bool = False) -> list[str]:
    """As `remove`, for one backend alone."""
    removed = (_remove_by(tool, leftovers, lambda: False, dry_run) for tool in _installed(tool_backend))
    return [line for lines, _ in removed for line in lines]


def is_anything_of(chains: Collection[TableAndName]) -> bool:
    """Whether any of these chains is there, of any backend and family, or the rule that `drain` lets stay.

    Tables are not read for that, since those of a mode that serves may be long.
    """
    return any(_is_held(tool) or any(tool.show(*each) for each in chains) for tool in _all_installed())


def drain(leftovers: Leftovers, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """As `remove`, so that open connections continue; what was removed, and whether another step is to come.

    Without any rule that asks for connection tracking the kernel lets go of its hooks, and of all that it has
    translated so far (nf_ct_netns_put()). With kube-proxy's rules for IPv6 that is so wherever the host has
    none of its own. So one stays that does nothing, in a family and as long as `translates` says that
    anything is translated there that needs it. It is asked at each call. Whichever program added it, the next
    call for whichever mode takes it away.

    Raises KernelError.
    """
    removed: list[str] = []
    left = False
    for tool in _all_installed():
        done, stays = _remove_by(tool, leftovers, functools.partial(translates, tool.family))
        removed += done
        left = left or stays
    return removed, left


def _installed(tool_backend: ToolBackend) -> list[Iptables]:
    return tool_backends.installed().get(tool_backend, [])


def _all_installed() -> Iterator[Iptables]:
    for tools in tool_backends.installed().values():
        yield from tools


def _is_held(tool: Iptables) -> bool:
    return tool.show(*_HOLDER)[1:] == [f"-A {names.FORWARD} {_HOLDING}"]


def _remove_by(
    tool: Iptables, leftovers: Leftovers, holds: Callable[[], bool], dry_run: bool = False
) -> tuple[list[str], bool]:
    """`holds`: whether the rule that holds connection tracking is to stay; it is asked if anything is there.

    What was removed, and whether that rule is there.
    """
    chains = chains_of(tool.save())
    is_held = chains.get(_HOLDER) == [_HOLDING]
    doomed = _without_what_stays(leftovers(chains) | ({_HOLDER} if is_held else set()), chains)
    has_room = _HOLDER not in chains or _HOLDER in doomed  # else it is another mode's, and does the same
    held = bool(doomed) and has_room and holds()
    if held and is_held and doomed == {_HOLDER}:
        return [], True
    jumps = [
        Rule(tool.family, table, name, text)
        for (table, name), rules in chains.items()
        if name in BUILT_IN
        for text in rules
        if (table, leads_to(text)) in doomed
    ]
    going = doomed - {_HOLDER} if held else doomed
    puts: dict[Key, Entry] = {Chain(tool.family, *_HOLDER): (_HOLDING,)} if held else {}
    drops: list[Key] = [*jumps, *(Chain(tool.family, *each) for each in going)]
    beside = Held(set(), Counter(jumps), {})
    block = script.block_for(tool.tool_backend)
    lines = script.compose(Delta(puts, frozenset(drops)), beside, _NO_RULE_PUT, block)
    if lines and not dry_run:
        tool.restore(lines.text)
    return [f"{tool} {line}" for line in _described(jumps, going)], held


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
