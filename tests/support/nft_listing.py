"""Parses the output of `nft list table` into entries of the nftables backend."""

import re
import socket
import struct
from collections.abc import Iterator

from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Endpoints,
    Entry,
    Flowtable,
    FlowtableDevice,
    Key,
    Map,
    Set,
    endpoint_bytes,
    endpoint_maps,
)
from ebpfproxy.linux.nft import flowtables, types
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.sets import LIST_KEY
from ebpfproxy.model.address import Family
from tests.support.nft_text import PROTOCOLS, canonical_declaration, canonical_hook, canonical_rule

_OPENING = re.compile(r"\t(chain|set|map|flowtable) (\S+) \{")
_ELEMENT = re.compile(
    r"""\s* (?P<key> [^\s,]+ (?: [ ]\.[ ] [^\s,]+ )* )
        (?: [ ] comment[ ]"(?P<comment>[^"]*)" | [ ](?!:[ ])[^\s,]+ )*
        (?: [ ]:[ ] (?P<verdict>[^,]+) )? (?:,|$)""",
    re.VERBOSE,
)
_DIGITS = frozenset(PROTOCOLS)
_ADDRESS = {Family.IPV4: types.IPV4, Family.IPV6: types.IPV6}


def parse(listing: str, of: Family) -> dict[Key, Entry]:
    """Chains, sets, maps and elements of one table with the family `of`. Empty if `listing` is.

    Objects of other kinds (counters and similar) are omitted: the backend writes none.
    """
    entries: dict[Key, Entry] = {}
    lines = iter(listing.splitlines())
    for line in lines:
        opening = _OPENING.fullmatch(line)
        if opening:
            kind, name = opening.groups()
            body = _body(lines)
            if kind == "flowtable":
                entries.update(_flowtable(of, name, body))
            else:
                entries.update(
                    [_chain(of, name, body)] if kind == "chain" else _container(of, kind, name, body)
                )
    return entries


def _body(lines: Iterator[str]) -> list[str]:
    """The stripped lines up to the closing brace of the object."""
    body = []
    for line in lines:
        if line == "\t}":
            break
        body.append(line.strip())
    return body


def _flowtable(of: Family, name: str, body: list[str]) -> Iterator[tuple[Key, Entry]]:
    """Entries as those that the backend writes, if the form is that of the backend."""
    form = [canonical_hook(f"{line};") for line in body if line.startswith("hook ")]
    devices = [line for line in body if line.startswith("devices = {")]
    declaration = " ".join([*form, *(["counter;"] if "counter" in body else [])])
    assert declaration == flowtables.DECLARATION
    yield Flowtable(of, name), declaration
    for line in devices:
        for device in line.removeprefix("devices = {").removesuffix("}").split(","):
            found = device.strip().strip('"')
            yield FlowtableDevice(of, name, found), socket.if_nametoindex(found)


def _chain(of: Family, name: str, body: list[str]) -> tuple[Key, Entry]:
    lines = [line for line in body if not line.startswith("comment ")]
    hook = lines.pop(0) if lines and lines[0].startswith("type ") else ""
    rules = tuple(Rule(canonical_rule(line)) for line in lines)
    return Chain(of, name), ChainEntry(canonical_hook(hook), rules)


def _container(of: Family, kind: str, name: str, body: list[str]) -> Iterator[tuple[Key, Entry]]:
    first = next((number for number, line in enumerate(body) if line.startswith("elements = {")), len(body))
    declaration = canonical_declaration(body[:first])
    yield (Set(of, name) if kind == "set" else Map(of, name)), declaration
    if "dynamic" not in declaration:
        text = " ".join(body[first:]).removeprefix("elements = {").removesuffix("}").rstrip()
        if Map(of, name) in endpoint_maps(of):
            yield from _endpoints(of, text)
            return
        for found in _ELEMENT.finditer(text):
            entry = ElementEntry(found["verdict"] or "", found["comment"] or "")
            yield Element(of, name, _canonical_key(found["key"])), entry


def _endpoints(of: Family, text: str) -> Iterator[tuple[Key, Entry]]:
    lists: dict[bytes, dict[int, bytes]] = {}
    for found in _ELEMENT.finditer(text):
        *identity, place = (int(each, 0) for each in found["key"].split(" . "))
        value = types.parse_key((_ADDRESS[of], types.PORT), found["verdict"])
        lists.setdefault(struct.pack("=II", *identity), {})[place] = value
    for packed, endpoints in lists.items():
        yield Endpoints(of, packed), b"".join(endpoints[place] for place in range(len(endpoints)))


def declaration_text(declaration: Entry) -> str:
    """A declaration in a command. nft accepts numbers in keys only with `typeof`."""
    text = str(declaration)
    ip = "ip6" if "ipv6_addr" in text else "ip"
    number = "numgen random mod 1"
    for types_of, expressions in (
        ("type mark . mark . mark :", f"typeof {number} . {number} . {number} :"),
        ("type mark . mark;", "typeof @nh,0,8 . @nh,0,8;"),
        (" . mark; size", f" . {number}; size"),
    ):
        if types_of in text:
            text = text.replace(types_of, expressions).replace("type ", "typeof ")
            return re.sub("ipv[46]_addr", f"{ip} {'saddr' if 'size' in text else 'daddr'}", text).replace(
                "inet_service", "th dport"
            )
    return text


def endpoints_of(key: Endpoints, entry: Entry) -> list[str]:
    """The endpoints of a list, each as address and port in the form of nft.

    >>> endpoints_of(Endpoints(Family.IPV4, bytes(8)), bytes((10, 1, 0, 1, 0, 80, 0, 0)))
    ['10.1.0.1 . 80']
    """
    assert isinstance(entry, bytes)
    size, form = endpoint_bytes(key.family), (_ADDRESS[key.family], types.PORT)
    return [types.key_text(form, entry[at : at + size]) for at in range(0, len(entry), size)]


def endpoint_elements(key: Endpoints, entry: Entry) -> list[str]:
    """The elements of a list, each as in the braces of a command."""
    first, second, _ = struct.unpack("=III", LIST_KEY.pack(key.identity, 0))
    return [f"{first} . {second} . {place} : {each}" for place, each in enumerate(endpoints_of(key, entry))]


def _canonical_key(text: str) -> str:
    """The protocol, if any, is the last part but one. Other numbers are marks."""
    parts = text.split(" . ")
    if parts[0].startswith("0x"):
        return " . ".join(f"0x{int(part, 0):08x}" for part in parts)
    if len(parts) > 1 and parts[-2] in _DIGITS:
        parts[-2] = PROTOCOLS[parts[-2]]
    return " . ".join(parts)


def element_text(key: Element, entry: ElementEntry) -> str:
    """An element as in the braces of a listing or a command.

    >>> element_text(Element(Family.IPV4, "service-nodeports", "tcp . 30080"), ElementEntry("drop", "a/b:c"))
    'tcp . 30080 comment "a/b:c" : drop'
    """
    comment = f' comment "{entry.comment}"' if entry.comment else ""
    verdict = f" : {entry.verdict}" if entry.verdict else ""
    return key.key + comment + verdict
