"""Removing everything that this mode ever left, and kube-proxy in its modes iptables and ipvs.

What stays on purpose:

- built-in chains and tables, also those that iptables-nft made for us: the kernel goes on translating what is
  open only as long as the table nat is there, and something asks for connection tracking (see `retire`);
- KUBE-FIREWALL with its rules and the jumps to it, since they are the kubelet's as well, and keep neighbours
  off 127.0.0.1 where route_localnet is on, which nobody turns off;
- the kubelet's own chains (KUBE-IPTABLES-HINT, KUBE-KUBELET-CANARY, KUBE-MARK-DROP);
- a chain that a rule of somebody else leads to, such as that of a CNI plugin to KUBE-MARK-MASQ, and what that
  chain leads to.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from ebpfproxy.dataplanes.interface import Delta
from ebpfproxy.dataplanes.iptables import flavours, names, script
from ebpfproxy.dataplanes.iptables.entries import (
    FILTER,
    NAT,
    NODE_CHAINS,
    SHARED_CHAINS,
    Chain,
    Entry,
    Key,
    Rule,
)
from ebpfproxy.dataplanes.iptables.rule_text import comment
from ebpfproxy.dataplanes.iptables.saved import BUILT_IN, Held, chains_of, leads_to
from ebpfproxy.kernel.iptables import Flavour, Iptables
from ebpfproxy.model.address import Family

TableAndName = tuple[str, str]

_OF_IPVS = (
    (NAT, "KUBE-LOAD-BALANCER"),
    (NAT, "KUBE-NODE-PORT"),
    (FILTER, "KUBE-NODE-PORT"),
    (FILTER, "KUBE-SOURCE-RANGES-FIREWALL"),
    (FILTER, "KUBE-IPVS-FILTER"),
    (FILTER, "KUBE-IPVS-OUT-FILTER"),
)
"""Chains that kube-proxy has in its mode ipvs alone (pkg/proxy/ipvs/proxier.go)."""

_HOLDER = (FILTER, names.FORWARD)
_HOLDING = f"{comment('what open connections need')} -m conntrack --ctstate NEW -j RETURN"
"""A rule that does nothing, in a chain that nothing leads to, and asks for connection tracking."""

_NAMES = {*NODE_CHAINS, *SHARED_CHAINS, *_OF_IPVS} - {(FILTER, names.FIREWALL)}


def remove(dry_run: bool = False) -> list[str]:
    """By both flavours, for both families, in the calling thread's network namespace; what was removed, or
    with `dry_run` would be, a line each; empty where nothing was there, or no tool that could have made it.

    New connections find nothing of it afterwards. Those that are open and were translated go on only where
    something else asks for connection tracking. Raises KernelError.
    """
    return [line for flavour in Flavour for line in remove_of(flavour, dry_run)]


def remove_of(flavour: Flavour, dry_run: bool = False) -> list[str]:
    """As `remove`, for one flavour alone."""
    return [line for tool in _installed(flavour) for line in _remove_by(tool, lambda: False, dry_run)[0]]


def retire(translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
    """As `remove`, so that open connections go on; what was removed, and whether another step is to come.

    Without any rule that asks for connection tracking the kernel lets go of its hooks, and of all that it has
    translated so far (nf_ct_netns_put()). Of kube-proxy's rules for IPv6 that is so, where the host has none
    of its own. So one stays that does nothing, in a family and as long as `translates` says that anything is
    translated there that needs it. It is asked at each call.

    Raises KernelError.
    """
    removed: list[str] = []
    left = False
    for tool in (tool for flavour in Flavour for tool in _installed(flavour)):
        done, stays = _remove_by(tool, functools.partial(translates, tool.family))
        removed += done
        left = left or stays
    return removed, left


def _installed(flavour: Flavour) -> list[Iptables]:
    return flavours.installed().get(flavour, [])


def _remove_by(tool: Iptables, holds: Callable[[], bool], dry_run: bool = False) -> tuple[list[str], bool]:
    """`holds`: whether the rule that holds connection tracking is to stay; it is asked if anything is there.

    What was removed, and whether that rule is there.
    """
    chains = chains_of(tool.save())
    doomed = _doomed(chains)
    held = bool(doomed) and holds()
    if held and doomed == {_HOLDER} and chains[_HOLDER] == [_HOLDING]:
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
    lines = script.compose(Delta(puts, frozenset(drops)), beside, script.block_for(tool.flavour))
    if lines and not dry_run:
        tool.restore(lines.text)
    return [f"{tool} {line}" for line in _described(jumps, going)], held


def _doomed(chains: Mapping[TableAndName, list[str]]) -> set[TableAndName]:
    """What goes: our chains, but for those that something leads to which stays."""
    doomed = {each for each in chains if each in _NAMES or _is_of_service(each)}
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
