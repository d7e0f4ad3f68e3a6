"""What rules of nftables do with the first packet of a connection: worked out from their text, rule by rule.

It knows the expressions and verdicts that the nftables dataplane writes, and stumbles over any other.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.dataplanes.nftables.entries import Chain, ChainEntry, Element, ElementEntry, Entry, Key
from ebpfproxy.model.address import Address, format_address
from tests.support.iptables_walk import Fate, Packet
from tests.support.nft_text import parse_range

_LOCAL = re.compile(r"fib ([sd])addr type local ")
_ADDRESS = re.compile(r"ip6? ([sd])addr (!= )?(?:@(\S+)|\{ ([^}]*) \}|([0-9a-f:][^ ]*)) ")
_DEVICE = re.compile(r'iifname (!= )?"([^"]*)" ')
_FRONTEND = re.compile(r"(ip6? daddr \. )?meta l4proto \. th dport vmap @(\S+)")
_CHOICE = re.compile(r"numgen random mod ([0-9]+) vmap \{ ([^}]*) \}")
_MARK = re.compile(r"meta mark set meta mark \| 0x[0-9a-f]{8}")
_UPDATE = re.compile(r"update @(\S+) \{ ip6? saddr timeout [0-9]+s \}")
_DNAT = re.compile(r"meta l4proto (\S+) dnat to (\S+)")
_HOOK = re.compile(r"type (nat|filter) hook (\S+) priority (-?[0-9]+); policy accept;")


class _BaseChain(NamedTuple):
    priority: int
    type: str
    name: str


class Ruleset:
    """What a kernel would hold of the entries of one family."""

    def __init__(self, entries: Mapping[Key, Entry]) -> None:
        self.chains = {
            k.name: e for k, e in entries.items() if isinstance(k, Chain) and isinstance(e, ChainEntry)
        }
        self.elements = {
            (key.container, key.key): entry.verdict
            for key, entry in entries.items()
            if isinstance(key, Element) and isinstance(entry, ElementEntry)
        }

    def fates(self, packet: Packet) -> set[Fate]:
        """All that may become of a new connection, as chance and remembered clients have it.

        What DNAT was done for is at an endpoint: it is followed no further.
        """
        hooks = ["output"] if packet.device == "" else ["prerouting"]
        if packet.destination_local:
            hooks.append("input")
        elif packet.device:
            hooks.append("forward")
        found: set[Fate] = set()
        alive = {False}
        for base in (base for hook in hooks for base in self._base_chains(hook)):
            ends = self._walk(base.name, packet, alive)
            found |= {fate for fate in ends if fate.verdict}
            alive = {fate.masquerade for fate in ends if not fate.verdict}
            if not alive:
                break
        return found | {Fate("", marked) for marked in alive}

    def _base_chains(self, hook: str) -> list[_BaseChain]:
        found = []
        for name, entry in self.chains.items():
            hooked = _HOOK.fullmatch(entry.hook)
            if hooked and hooked[2] == hook:
                found.append(_BaseChain(int(hooked[3]), hooked[1], name))
        return sorted(found)

    def _walk(self, chain: str, packet: Packet, marked: Iterable[bool]) -> set[Fate]:
        """The fates at the end of a chain; "" for what comes out of it again."""
        found = set()
        alive = set(marked)
        for text in self.chains[chain].rules:
            certain, rest = self._matched(text, packet)
            if certain is False:
                continue
            onward = set(alive) if certain is None else set()
            for verdict in self._verdicts(rest, packet):
                kind, _, target = verdict.partition(" ")
                if kind == "mark":
                    onward.add(True)
                elif kind == "jump":
                    ends = self._walk(target, packet, alive)
                    found |= {fate for fate in ends if fate.verdict}
                    onward |= {fate.masquerade for fate in ends if not fate.verdict}
                elif kind == "goto":
                    found |= self._walk(target, packet, alive)
                elif verdict:
                    found |= {Fate(verdict, mark) for mark in alive}
                else:
                    onward |= alive
            alive = onward
            if not alive:
                break
        return found | {Fate("", mark) for mark in alive}

    def _matched(self, text: str, packet: Packet) -> tuple[bool | None, str]:
        """Whether the packet matches, None where that depends on who came before; and what follows."""
        certain: bool | None = True
        text = re.sub(r' comment "[^"]*"$', "", text)
        text = text.removeprefix("ct state new ")
        while True:
            if found := _LOCAL.match(text):
                answer: bool | None = packet.source_local if found[1] == "s" else packet.destination_local
            elif found := _DEVICE.match(text):
                name = found[2]
                same = packet.device.startswith(name[:-1]) if name.endswith("*") else packet.device == name
                answer = same is not bool(found[1])
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
        if container and container.startswith("affinity-"):
            return None
        number = int.from_bytes(address)
        texts = [key for name, key in self.elements if name == container] if container else [many or one]
        ranges = [parse_range(each) for text in texts for each in text.split(", ")]
        return any(first <= number <= last for first, last in ranges) is not bool(negated)

    def _verdicts(self, text: str, packet: Packet) -> Iterator[str]:
        """Those that chance may choose from; "" where the rule does nothing."""
        if found := _FRONTEND.fullmatch(text):
            key = f"{packet.protocol} . {packet.port}"
            if found[1]:
                key = f"{format_address(packet.destination)} . {key}"
            yield _named(self.elements.get((found[2], key), ""))
        elif found := _CHOICE.fullmatch(text):
            choices = [choice.partition(" : ") for choice in found[2].split(", ")]
            assert [int(number) for number, _, _ in choices] == list(range(int(found[1])))
            yield from (verdict for _, _, verdict in choices)
        elif _MARK.fullmatch(text):
            yield "mark"
        elif found := _UPDATE.fullmatch(text):
            assert found[1].startswith("affinity-")
            yield ""
        elif found := _DNAT.fullmatch(text):
            yield f"DNAT {found[2]}" if found[1] == packet.protocol else ""
        else:
            assert re.fullmatch(r"drop|reject|(jump|goto) \S+", text), text
            yield _named(text)


def _named(verdict: str) -> str:
    return verdict.upper() if verdict in ("drop", "reject") else verdict
