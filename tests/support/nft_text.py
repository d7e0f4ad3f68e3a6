"""Rules and declarations in the canonical form of entries, independent of the version of `nft`.

The canonical form is the output of nft 1.0.6, except for what differs between versions, flags or machines:

- Protocols have names. A machine without /etc/protocols prints numbers, as `nft -p` does.
- Times are seconds, as with `nft -T`, and priorities are numbers, as with `nft -y`: names of priorities
  depend on the hook, and not all versions support them for all hooks.
- The addresses that a source is compared with are merged and sorted: an anonymous set that ends at the last
  address, or contains all addresses, keeps its braces although it has only one element.
- nft prints a test of a mark's top bit as a prefix of length one.
- nft prints the protocol with the source port that a rule hashes, instead of the match before.
- The parts of a declaration have one order, and only those that determine which elements fit are kept. The
  comment, the default timeout (all rules have their own) and the policy (memory or performance) are omitted.
  From 1.1.2 on, the number of elements follows the size.
"""

import re
from collections.abc import Sequence

from ebpfproxy.backends.nftables.port_ranges import Range, merged, network_range, range_text
from ebpfproxy.model.address import parse_address, parse_network

PROTOCOLS = {"6": "tcp", "17": "udp", "132": "sctp"}

_PRIORITIES = {"raw": -300, "mangle": -150, "dstnat": -100, "filter": 0, "security": 50, "srcnat": 100}
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}

_PART = re.compile(r"([0-9]+)(d|h|ms|m|s)")
_TIMEOUT = re.compile(r"(?<=\btimeout )((?:[0-9]+(?:d|h|ms|m|s))+)")
_L4PROTO = re.compile(r"(?<=\bmeta l4proto )(6|17|132)\b")
_SOURCES = re.compile(r"(?<= saddr != )(?:\{ (?P<many>[^}]*) \}|(?P<one>[0-9a-f:][^ ]*))")
_CHOICE = re.compile(r"(?<=map \{ )[^}]*(?= \})")
_HASHED_PORT = re.compile(r"(?<= saddr \. )(tcp|udp|sctp) sport(?= mod )")
_TOP_BIT = "meta mark != 0x00000000/1 "
_PRIORITY = re.compile(r"priority (?:([a-z]+)(?: ([+-]) ([0-9]+))?|(-?[0-9]+));")
_KEPT = ("type", "typeof", "size", "flags")


def canonical_rule(text: str) -> str:
    """The canonical form of a rule of the backend. For other rules, the result may be any text.

    >>> canonical_rule("meta l4proto 17 dnat to 10.0.0.1:53")
    'meta l4proto udp dnat to 10.0.0.1:53'
    >>> canonical_rule("update @affinity { ip saddr timeout 1h1m }")
    'update @affinity { ip saddr timeout 3660s }'
    >>> canonical_rule("ip saddr != { 10.0.0.0/9, 10.128.0.0/9 } drop")
    'ip saddr != 10.0.0.0/8 drop'
    >>> canonical_rule("dnat ip to jhash ip saddr . udp sport mod 251 map @endpoints-01")
    'meta l4proto udp dnat ip to jhash ip saddr . th sport mod 251 map @endpoints-01'
    """
    if "l4proto " in text:
        text = _L4PROTO.sub(lambda found: PROTOCOLS[found[1]], text)
    if " timeout " in text:
        text = _TIMEOUT.sub(lambda found: f"{_seconds(found[1])}s", text)
    if " saddr != " in text:
        text = _SOURCES.sub(_canonical_sources, text)
    if "numgen " in text:
        text = _CHOICE.sub(_sorted_choice, text)
    if found := _HASHED_PORT.search(text):
        text = f"meta l4proto {found[1]} {_HASHED_PORT.sub('th sport', text)}"
    if text.startswith(_TOP_BIT):
        text = f"meta mark & 0x80000000 != 0x00000000 {text.removeprefix(_TOP_BIT)}"
    return text


def canonical_hook(text: str) -> str:
    """
    >>> canonical_hook("type filter hook prerouting priority dstnat - 10; policy accept;")
    'type filter hook prerouting priority -110; policy accept;'
    """
    return _PRIORITY.sub(_number, text)


def canonical_declaration(parts: list[str]) -> str:
    """`parts`: the lines between the braces, without the elements.

    >>> canonical_declaration(["type ipv4_addr", "size 65535 # count 3", "flags dynamic,timeout"])
    'type ipv4_addr; size 65535; flags dynamic,timeout;'
    """
    named = {}
    for part in parts:
        word, _, rest = part.partition("#")[0].strip(" ;\t").partition(" ")
        named[word] = ",".join(sorted(re.split(r", ?", rest))) if word == "flags" else rest
    if "typeof" in named:
        named["type"] = " : ".join(map(_types, named.pop("typeof").split(" : ")))
    return " ".join(f"{word} {named[word]};" for word in _KEPT if word in named)


def _types(expressions: str) -> str:
    parts = (re.sub(r"[0-9]+", "", part.partition(" mod ")[0]) for part in expressions.split(" . "))
    v6 = "ip6 " in expressions
    return " . ".join(_TYPES.get(part, "ipv6_addr" if v6 else "ipv4_addr") for part in parts)


_TYPES = {"numgen random": "mark", "@nh,,": "mark", "th dport": "inet_service"}


def operand(ranges: Sequence[Range]) -> str:
    """The right side of a comparison: an anonymous set, or its only member.

    `ranges` are merged and not empty.
    """
    texts = [range_text(each) for each in ranges]
    return texts[0] if len(texts) == 1 else f"{{ {', '.join(texts)} }}"


def parse_range(text: str) -> Range:
    """Parses the output of `range_text`. Raises ValueError."""
    if "/" in text:
        return network_range(parse_network(text))
    first, dash, last = text.partition("-")
    start = int.from_bytes(parse_address(first))
    return Range(start, int.from_bytes(parse_address(last)) if dash else start)


def _seconds(text: str) -> int:
    return sum(int(count) * _SECONDS.get(unit, 0) for count, unit in _PART.findall(text))


def _canonical_sources(found: re.Match[str]) -> str:
    try:
        return operand(merged(map(parse_range, (found["many"] or found["one"]).split(", "))))
    except ValueError:
        return found[0]


def _sorted_choice(found: re.Match[str]) -> str:
    """Sorts the choices by number. All tested versions already print them sorted."""
    choices = [each.partition(" : ") for each in found[0].split(", ")]
    if not all(number.isdecimal() for number, _, _ in choices):
        return found[0]
    return ", ".join(map("".join, sorted(choices, key=lambda choice: int(choice[0]))))


def _number(found: re.Match[str]) -> str:
    name, sign, offset, number = found.groups()
    if number is None:
        if name not in _PRIORITIES:
            return found[0]
        number = _PRIORITIES[name] + int(f"{sign or '+'}{offset or 0}")
    return f"priority {number};"
