"""The operations of a transaction, in an order that the kernel can follow. Pure.

Within a transaction only this matters: what something refers to is there before it, and nothing refers to
what goes. A packet sees none of the steps between.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.backends.nftables.compiled import Compiled, Held
from ebpfproxy.backends.nftables.entries import Chain, Element, Key
from ebpfproxy.linux.nft import messages
from ebpfproxy.linux.nft.messages import Operation, SetNames, Table


class Step(NamedTuple):
    """`key` is None for the table itself. `needless`: where there is no such thing (ENOENT), nothing is to be
    done."""

    operation: Operation
    key: Key | None
    needless: bool = False


def transaction(table: Table, of: Compiled, held: Held, names: SetNames) -> Iterator[Step]:
    """All of it; the table, too, where it is not known to be there."""
    if not held.chains and not held.containers:
        yield Step(messages.add_table(table), None)
    yield from _emptied(table, of, held)
    for key, gone in of.gone.items():
        keys = (each._replace(verdict=None, comment="") for each in gone)
        yield Step(messages.delete_elements(table, key.container, keys), key, needless=True)
    yield from _made_anew(table, of)
    yield from containers(table, of, names)
    yield from chains(table, of)
    yield from rules(table, of, names)
    yield from elements(table, of)
    yield from _gone(table, of)


def containers(table: Table, of: Compiled, names: SetNames) -> Iterator[Step]:
    """Sets and maps, without elements."""
    for key, container in of.containers.items():
        yield Step(messages.add_set(table, key.name, container.declaration, names.number()), key)


def chains(table: Table, of: Compiled) -> Iterator[Step]:
    """Chains, without rules."""
    for key, chain in of.chains.items():
        yield Step(messages.add_chain(table, key.name, chain.hook), key)


def rules(table: Table, of: Compiled, names: SetNames) -> Iterator[Step]:
    for key, chain in of.chains.items():
        for rule in chain.rules:
            for operation in messages.add_rule(table, key.name, rule, names):
                yield Step(operation, key)


def elements(table: Table, of: Compiled) -> Iterator[Step]:
    for key, some in of.elements.items():
        for operation in messages.add_elements(table, key.container, some):
            yield Step(operation, key)


def refilled(table: Table, of: Compiled, held: Held, names: SetNames) -> Iterator[Step]:
    """Chains that are there, with other rules."""
    yield from _emptied(table, of, held)
    yield from rules(table, of, names)


def abandoned(table: Table, keys: Iterable[Key]) -> Iterator[Step]:
    """Chains that are there without rules, and are to be there no more."""
    for key in keys:
        if isinstance(key, Chain):
            yield Step(messages.delete_chain(table, key.name), key, needless=True)


def _emptied(table: Table, of: Compiled, held: Held) -> Iterator[Step]:
    """Chains that get other rules or go: their rules refer to nothing any more."""
    for key in itertools.chain(of.chains, of.drops):
        if isinstance(key, Chain) and key.name in held.chains:
            yield Step(messages.flush_chain(table, key.name), key, needless=True)


def _made_anew(table: Table, of: Compiled) -> Iterator[Step]:
    """What cannot be changed in place."""
    for key, chain in of.chains.items():
        if chain.is_rehooked:
            yield Step(messages.delete_chain(table, key.name), key, needless=True)
    for container, compiled in of.containers.items():
        if compiled.is_other:
            yield Step(messages.delete_set(table, container.name), container, needless=True)


def _gone(table: Table, of: Compiled) -> Iterator[Step]:
    for key in of.drops:
        if isinstance(key, Chain):
            yield Step(messages.delete_chain(table, key.name), key, needless=True)
    for key in of.drops:
        if not isinstance(key, Chain | Element):
            yield Step(messages.delete_set(table, key.name), key, needless=True)
