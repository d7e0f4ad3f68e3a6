"""Finds rules of other programs that a mode handles otherwise than kube-proxy's mode iptables did.

- Rules that drop forwarded packets. kube-proxy's mode iptables accepts those of Services in FORWARD. Mode
  ebpf has no rule there, and mode nftables cannot accept what another table drops.
- Rules before NAT that close NodePorts. In mode ebpf a packet has the address and port of the endpoint before
  any rule sees it.

See docs/other-programs.md#where-must-a-rule-be-in-each-mode.
"""

import errno
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.xtables import foreign_rules, tool_backends
from ebpfproxy.backends.xtables.foreign_rules import NODE_PORTS, Forwarded
from ebpfproxy.backends.xtables.saved import BUILT_IN
from ebpfproxy.config import Config
from ebpfproxy.config.derived import EBPF
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import links
from ebpfproxy.linux.nft import foreign, nft
from ebpfproxy.linux.nft.foreign import INGRESS, ForeignChain
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.xtables.iptables import Iptables
from ebpfproxy.model.address import Family, contains, family, parse_network
from ebpfproxy.plan.devices import uplinks

FORWARD = "forwarding to endpoints"
BEFORE_NAT = "no rules before NAT for NodePorts"
UNREAD = "rules of other programs"
"""The feature of the finding if they cannot be read."""

_NFTABLES = "nftables"
_MODES = (EBPF, _NFTABLES)
"""The modes that accept nothing in FORWARD of iptables."""
_OWN_TABLE = "kube-proxy"
_DNAT = -100  # the priority of NAT before routing
_LINK_LOCAL = parse_network("fe80::/10")
_MAX_SHOWN = 2


def probe(config: Config, mode: str) -> tuple[Finding, ...]:
    """Return the findings for a mode in the calling thread's network namespace. Nothing is needed.

    Empty for modes whose rules accept the packets.
    """
    if mode not in _MODES:
        return ()
    try:
        return tuple(_findings(config, mode))
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or -1
        return (Finding(UNREAD, number, failure.message, failure.hint, needed=False),)


class Dropping(NamedTuple):
    """What drops forwarded packets, and what to do about it.

    Without `is_certain` it may drop them: not all of its rules are understood.
    """

    what: str
    remedy: str
    is_certain: bool

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def dropping(config: Config, mode: str) -> Dropping | None:
    """Return what drops packets from outside to endpoints. None if nothing does, or if the rules cannot be
    read."""
    if mode not in _MODES or not _pass_forward(config, mode):
        return None
    try:
        return _dropping(_saved(), _foreign_chains(), mode, config.iptables_masquerade_bit)
    except KernelError:
        return None


def _pass_forward(config: Config, mode: str) -> bool:
    """Return whether forwarded packets pass FORWARD."""
    return not (mode == EBPF and config.ebpf_redirect)


def _saved() -> list[tuple[Iptables, str]]:
    return [(tool, tool.save()) for tools in tool_backends.installed().values() for tool in tools]


def _findings(config: Config, mode: str) -> Iterator[Finding]:
    saved, chains = _saved(), _foreign_chains()
    if _pass_forward(config, mode):
        found = _dropping(saved, chains, mode, config.iptables_masquerade_bit)
        if found:
            yield Finding(FORWARD, errno.EPERM, found.what, found.remedy, needed=False)
        else:
            yield Finding(FORWARD, needed=False)
    if mode == EBPF:
        yield _before_nat(saved, chains)


def _foreign_chains() -> list[ForeignChain]:
    """Return the base chains of nftables that neither an agent, kube-proxy nor iptables-nft has created."""
    try:
        with Session() as session:
            return foreign.base_chains(session, _is_foreign)
    except KernelError as failure:
        if nft.has_none(failure):
            return []
        raise


def _is_foreign(chain: ForeignChain) -> bool:
    is_of_iptables = chain.family in ("ip", "ip6") and chain.name in BUILT_IN
    return chain.table != _OWN_TABLE and not is_of_iptables


def _dropping(
    saved: list[tuple[Iptables, str]], chains: list[ForeignChain], mode: str, masquerade_bit: int
) -> Dropping | None:
    translated = mode != EBPF
    found = uplinks(links.read())
    served = {
        family(each) for device in found for each in device.addresses if not contains(_LINK_LOCAL, each)
    }
    packet = Forwarded([each.name for each in found], translated << masquerade_bit, translated)
    dropping = [
        tool
        for tool, printed in saved
        if tool.family in served and foreign_rules.drops_forwarded(printed, packet)
    ]
    if dropping:
        names = " and ".join(map(str, dropping))
        return Dropping(
            f"{names}: FORWARD drops connections from outside to endpoints",
            f"accept the pods' CIDR: {dropping[0]} -I FORWARD -d CIDR -j ACCEPT, also with -s; "
            "or use --proxy-mode=iptables",
            is_certain=True,
        )
    rejecting = [each for each in chains if _may_drop_forwarded(each, served, translated)]
    if rejecting:
        return Dropping(
            f"{rejecting[0]} may drop connections from outside to endpoints",
            "accept the pods' CIDR there, as source and as destination",
            is_certain=False,
        )
    return None


def _may_drop_forwarded(chain: ForeignChain, served: set[Family], translated: bool) -> bool:
    families = {"ip": {Family.IPV4}, "ip6": {Family.IPV6}}.get(chain.family, set(Family))
    if chain.hook.type != "filter" or chain.hook.hook != "forward" or not families & served:
        return False
    if translated and any(rule.matches_nat for rule in chain.rules):
        return False
    ends = any(rule.chain == chain.name and rule.drops and rule.matches_all for rule in chain.rules)
    return ends or not chain.accepts


def _before_nat(saved: list[tuple[Iptables, str]], chains: list[ForeignChain]) -> Finding:
    closing = [f"{tool} {rule}" for tool, printed in saved for rule in foreign_rules.closing_rules(printed)]
    closing += [str(each) for each in chains if _closes_node_ports(each)]
    if not closing:
        return Finding(BEFORE_NAT, needed=False)
    more = f", and {len(closing) - _MAX_SHOWN} more" if len(closing) > _MAX_SHOWN else ""
    return Finding(
        BEFORE_NAT,
        errno.EPERM,
        f"mode ebpf translates before these rules see the packets: {'; '.join(closing[:_MAX_SHOWN])}{more}",
        "limit clients by --nodeport-addresses, by loadBalancerSourceRanges, or in FORWARD by the addresses "
        "and ports of endpoints",
        needed=False,
    )


def _closes_node_ports(chain: ForeignChain) -> bool:
    is_early = chain.hook.hook == "prerouting" and chain.hook.priority < _DNAT
    if chain.hook.type != "filter" or not (is_early or chain.hook.hook == INGRESS):
        return False
    first, last = NODE_PORTS
    return not chain.accepts or any(
        rule.drops and rule.ports and rule.ports[0] <= last and rule.ports[1] >= first for rule in chain.rules
    )
