"""Computes what iptables rules do with a connection's first packet, by interpreting their text.

It supports the matches and targets that the iptables backend writes, and fails for any other.
"""

import shlex
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.backends.iptables.chains import LAYOUT
from ebpfproxy.backends.iptables.entries import Chain, Entry, Key, Layout, Rule, RulePosition, SharedChain
from ebpfproxy.model.address import Address, contains, parse_network

MARK_MASQ = "KUBE-MARK-MASQ"
_TERMINAL = {"ACCEPT", "DROP", "REJECT", "DNAT", "RETURN"}
_WITHOUT_VALUE = {"--reap", "--rcheck", "--set", "--rsource", "--random-fully"}


class Packet(NamedTuple):
    """`device`: "" for host-originated packets."""

    source: Address
    destination: Address
    protocol: str
    port: int
    device: str = "eth0"
    source_local: bool = False
    destination_local: bool = False


class PacketOutcome(NamedTuple):
    """`verdict`: "DNAT address:port", "REJECT", "DROP", "ACCEPT", or "" without a verdict of any rule."""

    verdict: str
    masquerade: bool


Ruleset = Mapping[tuple[str, str], list[str]]
"""By table and chain, the rules in order. It contains every chain that is a jump target."""


def ruleset(entries: Mapping[Key, Entry], layout: Layout = LAYOUT) -> Ruleset:
    """The kernel's rules for the entries of one family."""
    chains: dict[tuple[str, str], list[str]] = {}
    for key, entry in entries.items():
        if isinstance(key, Chain | SharedChain) and isinstance(entry, tuple):
            chains[key.table, key.name] = list(entry)
    rules = [key for key in entries if isinstance(key, Rule)]
    for rule in sorted(rules, key=lambda rule: _position(entries[rule])):
        if entries[rule] is not RulePosition.FIRST:
            chains.setdefault((rule.table, rule.chain), []).append(rule.text)
    jumps = [rule for rule in rules if entries[rule] is RulePosition.FIRST]
    for jump in sorted(jumps, key=layout.prepend_order):
        chains.setdefault((jump.table, jump.chain), []).insert(0, jump.text)
    return chains


def outcomes(rules: Ruleset, packet: Packet) -> set[PacketOutcome]:
    """All possible outcomes of a new connection, which may depend on chance and session affinity.

    An incoming packet passes nat PREROUTING and filter INPUT or FORWARD; a host-originated one passes OUTPUT
    of both and, if its destination is a local address, INPUT.
    """
    own = packet.device == ""
    found = set()
    for outcome in _walk(rules, "nat", "OUTPUT" if own else "PREROUTING", packet, {False}):
        if outcome.verdict:
            found.add(outcome)
            continue
        last = "INPUT" if packet.destination_local else "FORWARD"
        chains = ["OUTPUT", *["INPUT"] * packet.destination_local] if own else [last]
        alive = {outcome.masquerade}
        for chain in chains:
            passed = set()
            for each in _walk(rules, "filter", chain, packet, alive):
                if each.verdict in ("", "ACCEPT"):
                    passed.add(each.masquerade)
                else:
                    found.add(each)
            alive = passed
        found |= {PacketOutcome("", marked) for marked in alive}
    return found


def _position(entry: Entry) -> int:
    assert isinstance(entry, RulePosition)
    return entry


def _walk(
    rules: Ruleset, table: str, chain: str, packet: Packet, marked: Iterable[bool]
) -> set[PacketOutcome]:
    """The outcomes at the end of a chain; "" for a return to the calling chain."""
    found = set()
    alive = set(marked)
    for text in rules.get((table, chain), []):
        matches, target = _parse(text)
        answers = {mark: _matches(matches, packet, mark) for mark in alive}
        hit = {mark for mark, answer in answers.items() if answer is not False}
        alive = {mark for mark, answer in answers.items() if answer is not True}
        if not hit or not target:
            alive |= hit
        elif target[0] == MARK_MASQ:
            alive.add(True)
        elif target[0] == "RETURN":
            found |= {PacketOutcome("", mark) for mark in hit}
        elif target[0] in _TERMINAL:
            verdict = f"DNAT {target[2]}" if target[0] == "DNAT" else target[0]
            found |= {PacketOutcome(verdict, mark) for mark in hit}
        else:
            assert (table, target[0]) in rules, f"no chain {target[0]} in {table}"
            for outcome in _walk(rules, table, target[0], packet, hit):
                if outcome.verdict:
                    found.add(outcome)
                else:
                    alive.add(outcome.masquerade)
        if not alive:
            break
    return found | {PacketOutcome("", mark) for mark in alive}


def _parse(text: str) -> tuple[list[tuple[str, str, bool]], list[str]]:
    """The matches as option, value and negation; and the target with its options."""
    words = shlex.split(text)
    target: list[str] = []
    if "-j" in words:
        at = words.index("-j")
        words, target = words[:at], words[at + 1 :]
    matches = []
    negated = False
    while words:
        option = words.pop(0)
        if option == "!":
            negated = True
            continue
        value = "" if option in _WITHOUT_VALUE else words.pop(0)
        matches.append((option, value, negated))
        negated = False
    return matches, target


def _matches(matches: list[tuple[str, str, bool]], packet: Packet, marked: bool) -> bool | None:
    """None if it depends on chance or on session affinity."""
    certain = True
    for option, value, negated in matches:
        answer = _match(option, value, packet, marked)
        if answer is None:
            certain = False
        elif answer is negated:
            return False
    return True if certain else None


def _match(option: str, value: str, packet: Packet, marked: bool) -> bool | None:
    match option:
        case "-s":
            return contains(parse_network(value), packet.source)
        case "-d":
            return contains(parse_network(value), packet.destination)
        case "-i":
            return packet.device.startswith(value[:-1]) if value.endswith("+") else packet.device == value
        case "-p":
            return packet.protocol == value
        case "--dport":
            return packet.port == int(value)
        case "--src-type":
            return packet.source_local
        case "--dst-type":
            return packet.destination_local
        case "--ctstate":
            return "NEW" in value.split(",")
        case "--mark":
            return marked
        case "--probability" | "--rcheck":
            return None
        case (
            "-m"
            | "--comment"
            | "--mode"
            | "--set"
            | "--seconds"
            | "--reap"
            | "--name"
            | "--mask"
            | "--rsource"
            | "--nfacct-name"
        ):
            return True
    raise AssertionError(f"unknown match: {option} {value}")
