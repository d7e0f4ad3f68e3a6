"""Finds rules of other programs that a mode handles otherwise than kube-proxy's mode iptables did.

- Rules that drop forwarded packets. kube-proxy's mode iptables accepts those of Services in FORWARD. Mode
  ebpf has no rule there, and mode nftables cannot accept what another table drops.
- Rules before NAT that close NodePorts. In mode ebpf a packet has the address and port of the endpoint before
  any rule sees it.

Rules of iptables are the text of iptables-save. Each match of a rule holds, does not hold, or may hold, since
it depends on the packet or on other state. See docs/other-programs.md#where-must-a-rule-be-in-each-mode.
"""

import errno
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.iptables import probes
from ebpfproxy.backends.iptables.entries import BUILT_IN, FILTER, TableAndName, chains_of
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

ACCEPT, DROP = "ACCEPT", "DROP"
_CONTINUE, _RETURN = "", "RETURN"
_VERDICTS = {ACCEPT: ACCEPT, DROP: DROP, "REJECT": DROP, "NFQUEUE": ACCEPT, _RETURN: _RETURN}
_POLICY = re.compile(r"^:(\S+) (ACCEPT|DROP) ", re.MULTILINE)
_EARLY = ("raw", "mangle")
"""The tables whose PREROUTING comes before NAT."""
_PORTS = ("--dport", "--dports")
NODE_PORTS = (30000, 32767)
"""The first and last NodePort, if the API server has its default range."""


class Forwarded(NamedTuple):
    """The first packet of a TCP connection from outside to an endpoint, which may have any address.

    - `uplinks`: the names of the devices at which it may arrive.
    - `mark`: the bit of the mark that the current mode sets, 0 if it sets none.
    - `translated`: conntrack has translated its destination.
    """

    uplinks: Collection[str]
    mark: int = 0
    translated: bool = False


class _Match(NamedTuple):
    option: str
    values: tuple[str, ...]
    negated: bool


class _Rule(NamedTuple):
    """`target`: a verdict, a chain, or another target; "" for none."""

    matches: tuple[_Match, ...]
    target: str


def drops_forwarded(printed: str, packet: Forwarded) -> bool:
    """Return whether FORWARD certainly drops the packet.

    False if a rule may accept it, for example one for the network of pods, or if there is no such table.
    """
    chains, policies = chains_of(printed), _policies(printed)
    if (FILTER, "FORWARD") not in chains:
        return False
    found = _walk(chains, "FORWARD", packet)
    policy = {policies[FILTER, "FORWARD"]} if found & {_CONTINUE, _RETURN} else set()
    return found - {_CONTINUE, _RETURN} | policy == {DROP}


def closing_rules(printed: str) -> Iterator[str]:
    """Yield the rules in PREROUTING of raw and mangle that drop packets to NodePorts, also in chains to which
    PREROUTING jumps.

    >>> list(closing_rules("*raw\\n:PREROUTING ACCEPT [0:0]\\n-A PREROUTING -p tcp --dport 30080 -j DROP\\n"))
    ['raw PREROUTING: -p tcp --dport 30080 -j DROP']
    """
    chains, policies = chains_of(printed), _policies(printed)
    for table in _EARLY:
        if policies.get((table, "PREROUTING")) == DROP:
            yield f"{table} PREROUTING: policy DROP"
        yield from _closing(chains, table, "PREROUTING", has_port=False, seen=set())


def _closing(
    chains: Mapping[TableAndName, list[str]], table: str, chain: str, has_port: bool, seen: set[str]
) -> Iterator[str]:
    """`has_port`: a rule that leads to the chain matches NodePorts."""
    seen.add(chain)
    for text in chains.get((table, chain), ()):
        rule = _parse(text)
        ports = [_has_node_ports(each.values) for each in rule.matches if each.option in _PORTS]
        if not all(ports):
            continue
        if _VERDICTS.get(rule.target) == DROP and (ports or has_port):
            yield f"{table} {chain}: {text}"
        elif (table, rule.target) in chains and rule.target not in seen:
            yield from _closing(chains, table, rule.target, has_port or bool(ports), seen)


def _has_node_ports(values: Iterable[str]) -> bool:
    """Return whether one of the ports and ranges contains a NodePort. Names of ports are of lower ones."""
    for each in ",".join(values).split(","):
        first, _, last = each.partition(":")
        if first.isdigit() and _overlaps(int(first), int(last) if last.isdigit() else int(first)):
            return True
    return False


def _overlaps(first: int, last: int) -> bool:
    return first <= NODE_PORTS[1] and last >= NODE_PORTS[0]


def _policies(printed: str) -> dict[TableAndName, str]:
    found: dict[TableAndName, str] = {}
    for part in printed.split("*")[1:]:
        table = part.partition("\n")[0]
        found |= {(table, chain): policy for chain, policy in _POLICY.findall(part)}
    return found


def _walk(chains: Mapping[TableAndName, list[str]], chain: str, packet: Forwarded) -> set[str]:
    """Return the possible verdicts of a chain of the table filter; _CONTINUE if its end can be reached."""
    found: set[str] = set()
    for text in chains[FILTER, chain]:
        rule = _parse(text)
        answers = [_holds(each, packet) for each in rule.matches]
        if False in answers:
            continue
        outcome = _outcome(chains, rule.target, packet)
        found |= outcome - {_CONTINUE}
        if None not in answers and _CONTINUE not in outcome:
            return found
    return found | {_CONTINUE}


def _outcome(chains: Mapping[TableAndName, list[str]], target: str, packet: Forwarded) -> set[str]:
    if target in _VERDICTS:
        return {_VERDICTS[target]}
    if (FILTER, target) in chains:
        called = _walk(chains, target, packet)
        return called - {_RETURN} | ({_CONTINUE} if _RETURN in called else set())
    return {_CONTINUE}


def _parse(text: str) -> _Rule:
    matches: list[_Match] = []
    target, negated = "", False
    words = shlex.split(text)
    while words:
        word = words.pop(0)
        if word == "!":
            negated = True
            continue
        values = []
        while words and words[0] != "!" and not words[0].startswith("-"):
            values.append(words.pop(0))
        if word in ("-j", "-g"):
            target = values[0] if values else ""
            break  # the options of the target follow
        matches.append(_Match(word, tuple(values), negated))
        negated = False
    return _Rule(tuple(matches), target)


def _holds(match: _Match, packet: Forwarded) -> bool | None:
    """Return whether the match holds for the packet, None if it may."""
    answer = _holds_positive(match.option, " ".join(match.values), packet)
    return answer if answer is None else answer is not match.negated


def _holds_positive(option: str, value: str, packet: Forwarded) -> bool | None:
    match option:
        case "-m" | "--comment":
            return True
        case "-p":
            return value in ("tcp", "all")
        case "-i":
            return _is_one_of(value, packet.uplinks)
        case "-s" | "-d":
            # A rule for a single address does not accept connections to endpoints in general.
            return False if value.endswith(("/32", "/128")) else True if value.endswith("/0") else None
        case "--ctstate" | "--state":
            states = value.split(",")
            return "NEW" in states or ("DNAT" in states and packet.translated)
        case "--mark":
            bits, _, mask = value.partition("/")
            if mask and int(bits, 16) == int(mask, 16) == packet.mark:
                return True
            return False if int(mask or bits, 16) in _MARKS else None
        case "--src-type" | "--dst-type":
            return False if value == "LOCAL" else None
    return None


_MARKS = (0x4000,)
"""The default bit for packets to masquerade, which mode ebpf does not set."""


def _is_one_of(pattern: str, names: Collection[str]) -> bool | None:
    """Return whether the pattern of a device, such as "eth+", matches all names; None if it matches some."""
    prefix = pattern[:-1] if pattern.endswith("+") else None
    matching = [name for name in names if name == pattern or (prefix is not None and name.startswith(prefix))]
    if not names or 0 < len(matching) < len(names):
        return None
    return bool(matching)


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
    return [(tool, tool.save()) for tools in probes.installed().values() for tool in tools]


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
    dropping = [tool for tool, printed in saved if tool.family in served and drops_forwarded(printed, packet)]
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
    closing = [f"{tool} {rule}" for tool, printed in saved for rule in closing_rules(printed)]
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
