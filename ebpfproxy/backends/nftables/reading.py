"""Reads a table of the kernel as entries, which are equal to those that it was written from."""

from collections.abc import Iterator

from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, Element, ElementEntry, Entry, Key, Map, Set
from ebpfproxy.linux.nft import replies, types
from ebpfproxy.linux.nft.decompile import rule_text, verdict_text
from ebpfproxy.linux.nft.messages import Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.replies import ListedChain, ListedSet
from ebpfproxy.linux.nft.rule import AnonymousSet
from ebpfproxy.linux.nft.sets import Declaration, SetFlag, declaration_text, intervals
from ebpfproxy.model.address import Family

_OTHER = "other"
"""The entry of a set or map with a type that the agent never uses. No plan renders it."""


def read(session: Session, table: Table, family: Family) -> dict[Key, Entry]:
    """Return the entries; empty if there is no such table. Objects of kinds that the agent never creates, for
    example counters, are omitted.

    Raises NotFound if another program removes an object during the read.
    """
    found: dict[Key, Entry] = {}
    reported = session.sets(table)
    for each in reported:
        if not each.is_anonymous:
            found.update(_container(session, table, family, each))
    anonymous = _Anonymous(session, table, reported)
    for chain in session.chains(table):
        rules = [replies.read_rule(each, anonymous.get) for each in session.rules(table, chain.name)]
        texts = tuple(rule_text(rule, table.family) for rule in rules)
        found[Chain(family, chain.name)] = ChainEntry(_hook_text(chain), texts)
    return found


class _Anonymous:
    """The anonymous sets, by name. Each is read together with its rule."""

    def __init__(self, session: Session, table: Table, reported: list[ListedSet]) -> None:
        self._session = session
        self._table = table
        self._declarations = {each.name: each.declaration for each in reported if each.is_anonymous}

    def get(self, name: str) -> AnonymousSet | None:
        """Return the set; None if there is no anonymous set of this name with a known declaration."""
        declaration = self._declarations.get(name)
        if declaration is None:
            return None
        return AnonymousSet(declaration, tuple(self._session.elements(self._table, name)))


def _container(
    session: Session, table: Table, family: Family, reported: ListedSet
) -> Iterator[tuple[Key, Entry]]:
    """Yield a set or map and its elements, without elements that packets add."""
    if reported.declaration is None:
        yield Set(family, reported.name), _OTHER
        return
    key = (Map if reported.declaration.verdicts else Set)(family, reported.name)
    yield key, declaration_text(reported.declaration)
    if not reported.is_dynamic:
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


def _hook_text(chain: ListedChain) -> str:
    if chain.hook is None:
        return ""
    policy = "accept" if chain.accepts else "drop"
    return f"type {chain.hook.type} hook {chain.hook.hook} priority {chain.hook.priority}; policy {policy};"
