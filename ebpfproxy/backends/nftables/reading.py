"""Reads a table of the kernel as entries, which are equal to those that it was written from."""

import socket
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
    endpoint_map,
    endpoint_maps,
)
from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.flowtables import ListedFlowtable
from ebpfproxy.linux.nft.messages import Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.replies import ListedChain, ListedSet
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.sets import Declaration, SetFlag, declaration_text, intervals, verdict_text
from ebpfproxy.model.address import Family

_OTHER = "other"
"""The entry of a set or map with a type that the agent never uses, or of a flowtable of another form. No plan
renders it.
"""

_MOST_ENDPOINTS = 1 << 20
"""More than any Service has: another program may have added an element with any place."""


def read(session: Session, table: Table, family: Family) -> dict[Key, Entry]:
    """Return the entries; empty if there is no such table. Objects of kinds that the agent never creates, for
    example counters, are omitted.

    Raises NotFound if another program removes an object during the read.
    """
    found: dict[Key, Entry] = {}
    for each in session.sets(table):
        if not each.is_anonymous:
            found.update(_container(session, table, family, each))
    rules: dict[str, list[Rule]] = {}
    for listed in session.rules(table):
        rules.setdefault(listed.chain, []).append(listed.rule)
    for chain in session.chains(table):
        entry = ChainEntry(_hook_text(chain), tuple(rules.get(chain.name, ())))
        found[Chain(family, chain.name)] = entry
    for flowtable in session.flowtables(table):
        found.update(_flowtable(family, flowtable))
    return found


def _flowtable(family: Family, reported: ListedFlowtable) -> Iterator[tuple[Key, Entry]]:
    """Yield a flowtable and its devices. One of another form has no devices: it is recreated."""
    yield Flowtable(family, reported.name), reported.declaration or _OTHER
    for device in reported.devices if reported.declaration else ():
        yield FlowtableDevice(family, reported.name, device), _ifindex(device)


def _ifindex(device: str) -> int:
    """Return the ifindex in the calling thread's network namespace, 0 if the device does not exist."""
    try:
        return socket.if_nametoindex(device)
    except OSError:
        return 0


def _container(
    session: Session, table: Table, family: Family, reported: ListedSet
) -> Iterator[tuple[Key, Entry]]:
    """Yield a set or map and its elements, without elements that packets add."""
    if reported.declaration is None:
        yield Set(family, reported.name), _OTHER
        return
    is_map = reported.declaration.verdicts or reported.declaration.values
    declaration = declaration_text(reported.declaration)
    yield (Map if is_map else Set)(family, reported.name), declaration
    if Map(family, reported.name) in endpoint_maps(family) and declaration == endpoint_map(family):
        yield from _endpoints(session, table, family, reported.name)
    elif not reported.is_dynamic:
        yield from _elements(session, table, family, reported.name, reported.declaration)


def _elements(
    session: Session, table: Table, family: Family, name: str, declaration: Declaration
) -> Iterator[tuple[Key, Entry]]:
    elements = session.elements(table, name)
    if SetFlag.INTERVAL in declaration.flags:
        for interval in intervals(elements):
            yield Element(family, name, types.interval_text(declaration.key[0], interval)), ElementEntry()
        return
    for each in elements:
        verdict = verdict_text(each.verdict) if each.verdict else ""
        key = Element(family, name, types.key_text(declaration.key, each.key))
        yield key, ElementEntry(verdict, each.comment)


def _endpoints(session: Session, table: Table, family: Family, name: str) -> Iterator[tuple[Key, Entry]]:
    size = endpoint_bytes(family)
    lists: dict[bytes, dict[int, bytes]] = {}
    for identity, place, endpoint in session.listed(table, name, size - 4):
        lists.setdefault(identity, {})[place] = endpoint
    for identity, places in lists.items():
        if Endpoints(family, identity).container != name:  # another program has added it
            continue
        length = min(max(places) + 1, _MOST_ENDPOINTS)
        endpoints = b"".join([places.get(place) or bytes(size) for place in range(length)])
        yield Endpoints(family, identity), endpoints


def _hook_text(chain: ListedChain) -> str:
    if chain.hook is None:
        return ""
    policy = "accept" if chain.accepts else "drop"
    return f"type {chain.hook.type} hook {chain.hook.hook} priority {chain.hook.priority}; policy {policy};"
