"""The operations of a transaction, in an order that the kernel accepts. Pure.

Within a transaction, an object must exist before others refer to it, and must be deleted after them. Packets
see no intermediate state.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.backends.nftables.compiled import Compiled, KnownObjects
from ebpfproxy.backends.nftables.entries import Chain, Key, Map, Set
from ebpfproxy.linux.nft import messages
from ebpfproxy.linux.nft.messages import Operation, Table
from ebpfproxy.linux.nft.rule_expressions import SetNames


class Step(NamedTuple):
    """One operation. `key` is None for the table itself. `may_be_absent`: if the object does not exist
    (ENOENT), there is nothing to do.
    """

    operation: Operation
    key: Key | None
    may_be_absent: bool = False


def transaction(table: Table, change: Compiled, known: KnownObjects, names: SetNames) -> Iterator[Step]:
    """Yield all steps of a change. They include the table if it is not known to exist."""
    if not known.chains and not known.containers:
        yield Step(messages.add_table(table), None)
    yield from _flushes(table, change, known)
    for key, removed in change.removed.items():
        keys = (each._replace(verdict=None, comment="") for each in removed)
        yield Step(messages.delete_elements(table, key.container, keys), key, may_be_absent=True)
    for listed, endpoints in change.endpoints.items():
        for operation in messages.delete_listed(table, listed.container, listed.identity, endpoints.removed):
            yield Step(operation, listed, may_be_absent=True)
    yield from _recreations(table, change)
    yield from containers(table, change, names)
    yield from chains(table, change)
    yield from rules(change)
    yield from elements(table, change)
    yield from _deletions(table, change)


def containers(table: Table, change: Compiled, names: SetNames) -> Iterator[Step]:
    """Create sets and maps, without elements."""
    for key, container in change.containers.items():
        yield Step(messages.add_set(table, key.name, container.declaration, names.number()), key)


def chains(table: Table, change: Compiled) -> Iterator[Step]:
    """Create chains, without rules."""
    for key, chain in change.chains.items():
        yield Step(messages.add_chain(table, key.name, chain.hook), key)


def rules(change: Compiled) -> Iterator[Step]:
    for key, chain in change.chains.items():
        for operation in chain.rules:
            yield Step(operation, key)


def elements(table: Table, change: Compiled) -> Iterator[Step]:
    for key, compiled in change.elements.items():
        for operation in messages.add_elements(table, key.container, compiled):
            yield Step(operation, key)
    for listed, endpoints in change.endpoints.items():
        for operation in messages.add_listed(table, listed.container, listed.identity, endpoints.added):
            yield Step(operation, listed)


def refills(table: Table, change: Compiled, known: KnownObjects) -> Iterator[Step]:
    """Replace the rules of existing chains."""
    yield from _flushes(table, change, known)
    yield from rules(change)


def chain_deletions(table: Table, keys: Iterable[Key]) -> Iterator[Step]:
    """Delete existing chains without rules."""
    for key in keys:
        if isinstance(key, Chain):
            yield Step(messages.delete_chain(table, key.name), key, may_be_absent=True)


def _flushes(table: Table, change: Compiled, known: KnownObjects) -> Iterator[Step]:
    """Flush chains that get other rules or are deleted, so that their rules refer to nothing."""
    for key in itertools.chain(change.chains, change.drops):
        if isinstance(key, Chain) and key.name in known.chains:
            yield Step(messages.flush_chain(table, key.name), key, may_be_absent=True)


def _recreations(table: Table, change: Compiled) -> Iterator[Step]:
    """Delete objects that cannot be changed in place, before they are created again."""
    for key, chain in change.chains.items():
        if chain.is_rehooked:
            yield Step(messages.delete_chain(table, key.name), key, may_be_absent=True)
    for container, compiled in change.containers.items():
        if compiled.is_other:
            yield Step(messages.delete_set(table, container.name), container, may_be_absent=True)


def _deletions(table: Table, change: Compiled) -> Iterator[Step]:
    for key in change.drops:
        if isinstance(key, Chain):
            yield Step(messages.delete_chain(table, key.name), key, may_be_absent=True)
    for key in change.drops:
        if isinstance(key, Set | Map):
            yield Step(messages.delete_set(table, key.name), key, may_be_absent=True)
