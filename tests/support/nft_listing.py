"""Parses the output of `nft list table` into entries of the nftables backend."""

import re
from collections.abc import Iterator

from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, Element, ElementEntry, Entry, Key, Map, Set
from ebpfproxy.model.address import Family
from tests.support.nft_text import PROTOCOLS, canonical_declaration, canonical_hook, canonical_rule

_OPENING = re.compile(r"\t(chain|set|map) (\S+) \{")
_ELEMENT = re.compile(
    r"""\s* (?P<key> [^\s,]+ (?: [ ]\.[ ] [^\s,]+ )* )
        (?: [ ] comment[ ]"(?P<comment>[^"]*)" | [ ](?!:[ ])[^\s,]+ )*
        (?: [ ]:[ ] (?P<verdict>[^,]+) )? (?:,|$)""",
    re.VERBOSE,
)
_DIGITS = frozenset(PROTOCOLS)


def parse(listing: str, of: Family) -> dict[Key, Entry]:
    """Chains, sets, maps and elements of one table with the family `of`. Empty if `listing` is.

    Objects of other kinds (counters, flow tables and similar) are omitted: the backend writes none.
    """
    entries: dict[Key, Entry] = {}
    lines = iter(listing.splitlines())
    for line in lines:
        opening = _OPENING.fullmatch(line)
        if opening:
            kind, name = opening.groups()
            body = _body(lines)
            entries.update([_chain(of, name, body)] if kind == "chain" else _container(of, kind, name, body))
    return entries


def _body(lines: Iterator[str]) -> list[str]:
    """The stripped lines up to the closing brace of the object."""
    body = []
    for line in lines:
        if line == "\t}":
            break
        body.append(line.strip())
    return body


def _chain(of: Family, name: str, body: list[str]) -> tuple[Key, Entry]:
    lines = [line for line in body if not line.startswith("comment ")]
    hook = lines.pop(0) if lines and lines[0].startswith("type ") else ""
    return Chain(of, name), ChainEntry(canonical_hook(hook), tuple(map(canonical_rule, lines)))


def _container(of: Family, kind: str, name: str, body: list[str]) -> Iterator[tuple[Key, Entry]]:
    first = next((number for number, line in enumerate(body) if line.startswith("elements = {")), len(body))
    declaration = canonical_declaration(body[:first])
    yield (Set(of, name) if kind == "set" else Map(of, name)), declaration
    if "dynamic" not in declaration:
        text = " ".join(body[first:]).removeprefix("elements = {").removesuffix("}").rstrip()
        for found in _ELEMENT.finditer(text):
            entry = ElementEntry(found["verdict"] or "", found["comment"] or "")
            yield Element(of, name, _canonical_key(found["key"])), entry


def _canonical_key(text: str) -> str:
    """The protocol, if any, is the last part but one."""
    parts = text.split(" . ")
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
