"""Computes what nftables rules do with a connection's first packet, by interpreting their text.

It supports the expressions and verdicts that the nftables backend writes, and fails for any other.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Endpoints,
    Entry,
    Key,
)
from ebpfproxy.model.address import Address, Family, family, format_address, format_endpoint, parse_address
from tests.support.iptables_walk import Packet, PacketOutcome
from tests.support.nft_listing import endpoints_of
from tests.support.nft_text import parse_range

_LOCAL = re.compile(r"fib ([sd])addr type (!= )?local ")
_ADDRESS = re.compile(r"ip6? ([sd])addr (!= )?(?:@(\S+)|\{ ([^}]*) \}|([0-9a-f:][^ ]*)) ")
_DEVICE = re.compile(r'iifname (!= )?"([^"]*)" ')
_FRONTEND = re.compile(r"(ip6? daddr \. )?meta l4proto \. th dport vmap @(\S+)")
_MARK = re.compile(r"meta mark set meta mark \| 0x[0-9a-f]{8}")
_CLIENT = r"ip6? saddr \. numgen random mod 1 offset [0-9]+"
_REMEMBERED = re.compile(rf"{_CLIENT} @affinity ")
_UPDATE = re.compile(rf"update @affinity \{{ {_CLIENT} timeout [0-9]+s \}} ")
_HASH = r"jhash ip6? saddr(?: \. th sport)? mod ([0-9]+) seed 0x65627066"
_DRAWN = rf"(?:numgen (?:random|inc) mod ([0-9]+)|{_HASH})"
_SHARE = re.compile(rf"{_DRAWN} (?:0|< [0-9]+) ")
_DNAT = re.compile(r"meta l4proto (\S+) dnat to (\S+)")
_DNAT_CHOICE = re.compile(
    r"meta l4proto (\S+) dnat ip6? to numgen random mod 1 offset ([0-9]+)"
    rf" \. numgen random mod 1 offset ([0-9]+) \. {_DRAWN} map @(endpoints-[0-9]+)"
)
_MARKED = re.compile(r"meta mark & (0x[0-9a-f]{8}) != 0x00000000 meta mark set meta mark \^ \1 ")
_SAME_BYTE = re.compile(r"@nh,([0-9]+),8 \. @nh,([0-9]+),8 @equal-bytes ")
_TRANSLATED = "ct status dnat "
_END = "end of the chain"
_HOOK = re.compile(r"type (nat|filter) hook (\S+) priority (-?[0-9]+); policy accept;")


class _BaseChain(NamedTuple):
    priority: int
    type: str
    name: str


class Ruleset:
    """The kernel's rules for the entries of one family."""

    def __init__(self, entries: Mapping[Key, Entry]) -> None:
        self.chains = {
            k.name: e for k, e in entries.items() if isinstance(k, Chain) and isinstance(e, ChainEntry)
        }
        self.elements = {
            (key.container, key.key): entry.verdict
            for key, entry in entries.items()
            if isinstance(key, Element) and isinstance(entry, ElementEntry)
        }
        self.endpoints = {
            (key.container, key.identity): endpoints_of(key, entry)
            for key, entry in entries.items()
            if isinstance(key, Endpoints)
        }

    def outcomes(self, packet: Packet) -> set[PacketOutcome]:
        """All possible outcomes of a new connection, which may depend on chance and session affinity.

        A packet with DNAT, or without a verdict, is assumed to reach its destination through the last hook.
        """
        hooks = ["output"] if packet.device == "" else ["prerouting"]
        if packet.destination_local:
            hooks.append("input")
        elif packet.device:
            hooks.append("forward")
        found: set[PacketOutcome] = set()
        alive = {False}
        for base in (base for hook in hooks for base in self._base_chains(hook)):
            ends = self._walk(base.name, packet, alive)
            found |= {outcome for outcome in ends if outcome.verdict}
            alive = {outcome.masquerade for outcome in ends if not outcome.verdict}
            if not alive:
                break
        found |= {PacketOutcome("", marked) for marked in alive}
        return {self._sent(packet, outcome) for outcome in found}

    def _sent(self, packet: Packet, outcome: PacketOutcome) -> PacketOutcome:
        """The outcome with the translation of the source address, which does not only depend on the mark."""
        verdict, marked = outcome
        if verdict in ("DROP", "REJECT"):
            return PacketOutcome(verdict, False)
        if verdict:
            address, _, port = verdict.removeprefix("DNAT ").rpartition(":")
            packet = packet._replace(destination=parse_address(address.strip("[]")), port=int(port))
        ends = {PacketOutcome("", marked)}
        for base in self._base_chains("postrouting"):
            ends = self._walk(base.name, packet, {marked}, translated=bool(verdict))
        (end,) = ends
        assert end in (PacketOutcome("MASQUERADE", False), PacketOutcome("", False)), (
            "the masquerade mark must be cleared"
        )
        return PacketOutcome(verdict, bool(end.verdict))

    def _base_chains(self, hook: str) -> list[_BaseChain]:
        found = []
        for name, entry in self.chains.items():
            hooked = _HOOK.fullmatch(entry.hook)
            if hooked and hooked[2] == hook:
                found.append(_BaseChain(int(hooked[3]), hooked[1], name))
        return sorted(found)

    def _walk(
        self, chain: str, packet: Packet, marked: Iterable[bool], translated: bool = False
    ) -> set[PacketOutcome]:
        """The outcomes at the end of a chain; "" for a return to the calling chain. Before postrouting,
        `masquerade` is the mark."""
        found = set()
        alive = set(marked)
        for text in map(str, self.chains[chain].rules):
            before, alive = alive, set()
            for mark in before:
                for outcome in self._ruled(text, packet, mark, translated):
                    if outcome.verdict == _END:
                        found.add(outcome._replace(verdict=""))
                    elif outcome.verdict:
                        found.add(outcome)
                    else:
                        alive.add(outcome.masquerade)
            if not alive:
                break
        return found | {PacketOutcome("", mark) for mark in alive}

    def _ruled(self, text: str, packet: Packet, mark: bool, translated: bool) -> Iterator[PacketOutcome]:
        """The possible outcomes of one rule: "" to continue with the next rule, _END after the end of a
        goto."""
        text = re.sub(r' comment "[^"]*"$', "", text)
        if text.startswith(_TRANSLATED) and not translated:
            yield PacketOutcome("", mark)
            return
        if found := _MARKED.match(text):
            if not mark:
                yield PacketOutcome("", mark)
                return
            text, mark = text[found.end() :], False
        certain, rest = self._matched(text.removeprefix(_TRANSLATED), packet)
        if certain is not True:
            yield PacketOutcome("", mark)
        if certain is False:
            return
        for verdict in self._verdicts(rest, packet):
            kind, _, target = verdict.partition(" ")
            if kind == "mark":
                yield PacketOutcome("", True)
            elif kind == "jump":
                yield from self._walk(target, packet, {mark}, translated)
            elif kind == "goto":
                for outcome in self._walk(target, packet, {mark}, translated):
                    yield outcome if outcome.verdict else PacketOutcome(_END, outcome.masquerade)
            else:
                yield PacketOutcome(verdict, mark)

    def _matched(self, text: str, packet: Packet) -> tuple[bool | None, str]:
        """Whether the packet matches, None if it depends on session affinity; and the rest of the rule."""
        certain: bool | None = True
        text = text.removeprefix("ct state new ")
        while True:
            if found := _LOCAL.match(text):
                is_local = packet.source_local if found[1] == "s" else packet.destination_local
                answer: bool | None = is_local is not bool(found[2])
            elif found := _DEVICE.match(text):
                name = found[2]
                same = packet.device.startswith(name[:-1]) if name.endswith("*") else packet.device == name
                answer = same is not bool(found[1])
            elif found := _SAME_BYTE.match(text):
                header = _network_header(packet)
                one, other = (f"0x{header[int(bits) // 8]:08x}" for bits in found.groups())
                answer = ("equal-bytes", f"{one} . {other}") in self.elements
            elif found := _REMEMBERED.match(text) or _UPDATE.match(text) or _SHARE.match(text):
                answer = None
            elif found := _ADDRESS.match(text):
                address = packet.source if found[1] == "s" else packet.destination
                answer = self._contained(found, address)
            else:
                return certain, text
            text = text[found.end() :]
            if answer is False:
                return False, text
            certain = None if answer is None else certain

    def _contained(self, found: re.Match[str], address: Address) -> bool | None:
        _, negated, container, many, one = found.groups()
        number = int.from_bytes(address)
        texts = [key for name, key in self.elements if name == container] if container else [many or one]
        ranges = [parse_range(each) for text in texts for each in text.split(", ")]
        return any(first <= number <= last for first, last in ranges) is not bool(negated)

    def _verdicts(self, text: str, packet: Packet) -> Iterator[str]:
        """The verdicts from which one is chosen at random; "" if the rule does nothing."""
        if found := _FRONTEND.fullmatch(text):
            key = f"{packet.protocol} . {packet.port}"
            if found[1]:
                key = f"{format_address(packet.destination)} . {key}"
            yield _named(self.elements.get((found[2], key), ""))
        elif _MARK.fullmatch(text):
            yield "mark"
        elif found := _DNAT.fullmatch(text):
            yield f"DNAT {found[2]}" if found[1] == packet.protocol else ""
        elif found := _DNAT_CHOICE.fullmatch(text):
            identity = struct.pack("=II", int(found[2]), int(found[3]))
            endpoints, modulus = self.endpoints[found[6], identity], int(found[4] or found[5])
            assert modulus in (1, len(endpoints))
            for endpoint in endpoints[:modulus]:
                address, _, port = endpoint.partition(" . ")
                destination = format_endpoint(parse_address(address), int(port))
                yield f"DNAT {destination}" if found[1] == packet.protocol else ""
        elif text == "masquerade fully-random":
            yield "MASQUERADE"
        else:
            assert re.fullmatch(r"drop|reject|(jump|goto) \S+", text), text
            yield _named(text)


def _network_header(packet: Packet) -> bytes:
    """The network header with the addresses, and zeros elsewhere."""
    if family(packet.source) is Family.IPV4:
        return bytes(12) + packet.source[12:] + packet.destination[12:]
    return bytes(8) + packet.source + packet.destination


def _named(verdict: str) -> str:
    return verdict.upper() if verdict in ("drop", "reject") else verdict
