"""What rules of other programs do with packets to Services and endpoints. Pure.

The rules are the text of iptables-save. Each match of a rule holds, does not hold, or may hold, since it
depends on the packet or on other state.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.backends.xtables.entries import FILTER
from ebpfproxy.backends.xtables.layout import TableAndName
from ebpfproxy.backends.xtables.saved import chains_of

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
