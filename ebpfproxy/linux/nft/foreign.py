"""Reads base chains of other programs, of all families, and what their rules do as far as it can be seen.

Rules are decoded just enough to recognize those that drop packets. Sources: see `messages`.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.linux.netlink.netlink import attributes, text
from ebpfproxy.linux.nft.encoding import Code, number
from ebpfproxy.linux.nft.expressions import Base, Comparison
from ebpfproxy.linux.nft.messages import HEAD, Hook, Kind
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.replies import read_chain, table_name

_FAMILIES = {1: "inet", 2: "ip", 5: "netdev", 10: "ip6"}
"""NFPROTO_*."""
INGRESS = "ingress"
_INGRESS = {("inet", 5): INGRESS, ("netdev", 0): INGRESS}
_DPORT = (Base.TRANSPORT, 2, 2)
_CT_STATUS = 2  # NFT_CT_STATUS
_WITHOUT_MATCH = frozenset({"counter", "log", "reject", "immediate"})
_COMPARING = frozenset({"cmp", "range", "lookup"})
_ALL_PORTS = (0, 0xFFFF)


class ForeignRule(NamedTuple):
    """- `drops`: it drops or rejects what it matches. `target`: the chain that it jumps to, "" for none.
    - `matches_all`: it matches all packets.
    - `ports`: the destination ports that it matches, first and last; None if it does not match ports.
    - `matches_nat`: it matches the status of conntrack, such as "translated".
    """

    chain: str
    drops: bool
    target: str
    matches_all: bool
    ports: tuple[int, int] | None
    matches_nat: bool


class ForeignChain(NamedTuple):
    """A base chain. `family`: "ip", "ip6", "inet" or "netdev". `hook` is INGRESS at a device.

    `rules`: also those of chains to which it jumps, with the ports of the jump if they match none.
    """

    family: str
    table: str
    name: str
    hook: Hook
    accepts: bool
    rules: tuple[ForeignRule, ...]

    def __str__(self) -> str:
        return f"table {self.family} {self.table}, chain {self.name}"


def base_chains(session: Session, wanted: Callable[[ForeignChain], bool]) -> list[ForeignChain]:
    """Return the base chains of the network namespace that are `wanted`, which gets them without rules.

    Raises KernelError.
    """
    found = {
        (payload[0], chain.table, chain.name): chain
        for payload in session.dump(Kind.GET_CHAIN)
        if (chain := _base_chain(payload)) and wanted(chain)
    }
    rules: dict[tuple[int, str], list[ForeignRule]] = {key[:2]: [] for key in found}
    for payload in session.dump(Kind.GET_RULE) if found else ():
        key = payload[0], table_name(payload)
        if key in rules:
            rules[key].append(read_rule(payload))
    return [
        chain._replace(rules=tuple(_reached(rules[of, table], name, None, set())))
        for (of, table, name), chain in found.items()
    ]


def _base_chain(payload: bytes) -> ForeignChain | None:
    chain, family = read_chain(payload), _FAMILIES.get(payload[0])
    if not chain.hook or not family:
        return None
    position = dict(attributes(dict(attributes(payload, HEAD.size))[4], 0))
    hook = chain.hook._replace(hook=_INGRESS.get((family, number(position[1])), chain.hook.hook))
    return ForeignChain(family, table_name(payload), chain.name, hook, chain.accepts, ())


def _reached(
    rules: Sequence[ForeignRule], chain: str, ports: tuple[int, int] | None, seen: set[str]
) -> Iterator[ForeignRule]:
    seen.add(chain)
    for rule in rules:
        if rule.chain == chain:
            of_rule = rule.ports or ports
            yield rule._replace(ports=of_rule)
            if rule.target and rule.target not in seen:
                yield from _reached(rules, rule.target, of_rule, seen)


def read_rule(payload: bytes) -> ForeignRule:
    found = dict(attributes(payload, HEAD.size))
    verdict, target, names = int(Code.ACCEPT), "", []
    ports: tuple[int, int] | None = None
    matches_nat, loads_port = False, False
    for _, expression in attributes(found.get(4, b""), 0):
        parts = dict(attributes(expression, 0))
        name, data = text(parts.get(1)), dict(attributes(parts.get(2, b""), 0))
        names.append(name)
        if name in _COMPARING:
            ports = _narrowed(ports or _ALL_PORTS, name, data) if loads_port else ports
            continue
        loads_port = name == "payload" and tuple(number(data.get(each)) for each in (2, 3, 4)) == _DPORT
        matches_nat = matches_nat or (name == "ct" and number(data.get(2)) == _CT_STATUS)
        if name == "immediate":
            verdict, target = _verdict(data.get(2, b"")) or (verdict, target)
    drops = "reject" in names or ("immediate" in names and verdict == Code.DROP and not target)
    matches_all = _WITHOUT_MATCH.issuperset(names)
    return ForeignRule(text(found.get(2)), drops, target, matches_all, ports, matches_nat)


def _verdict(data: bytes) -> tuple[int, str] | None:
    """The code and the chain of a verdict; None for other data."""
    verdict = dict(attributes(data, 0)).get(2)
    if verdict is None:
        return None
    parts = dict(attributes(verdict, 0))
    return int.from_bytes(parts.get(1, b""), "big", signed=True), text(parts.get(2))


def _narrowed(ports: tuple[int, int], name: str, data: dict[int, bytes]) -> tuple[int, int]:
    """The ports that also match the next expression. Those of a set are unknown, so they may be all."""
    first, last = ports
    if name == "range" and number(data.get(2)) == Comparison.EQUAL:
        return max(first, _port(data.get(3))), min(last, _port(data.get(4)))
    if name == "cmp":
        value = _port(data.get(3))
        match number(data.get(2)):
            case Comparison.EQUAL:
                return value, value
            case Comparison.AT_LEAST:
                return max(first, value), last
            case Comparison.AT_MOST:
                return first, min(last, value)
    return ports


def _port(data: bytes | None) -> int:
    return socket.ntohs(int.from_bytes(dict(attributes(data or b"", 0)).get(1, b""), "little"))
