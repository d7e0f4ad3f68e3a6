"""Transactions that come about: without what the kernel refuses of them."""

import errno
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ebpfproxy.backends.nftables.entries import Chain, Key
from ebpfproxy.backends.nftables.steps import Step, abandoned
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.nft import nft
from ebpfproxy.linux.nft.messages import Kind, Table
from ebpfproxy.linux.nft.nft import Refusal, Session

_OF_THE_WHOLE = frozenset({errno.EOPNOTSUPP, errno.ELOOP, errno.EMLINK})
"""What is said where chains do not fit together: of the rule that made it so, and of all after it."""

_SURPRISING = frozenset({errno.ENOENT, errno.EEXIST, errno.EBUSY})


class Done(NamedTuple):
    """`refused` by key; `emptied`: chains that could only be emptied yet, since something still goes there.
    `is_surprising`: a refusal may come of a table that is not as it was thought to be."""

    refused: dict[Key, KernelError]
    emptied: list[str]
    is_surprising: bool


def committed(
    session: Session,
    table: Table,
    of: Iterable[Step],
    without: Collection[Key] = (),
    abandoning: bool = False,
) -> Done:
    """Commit these steps, or as many as the kernel takes: of a key that is refused, none.

    `without`: keys that were refused before, so that no step is about them. With `abandoning` a chain of
    which a rule is refused is deleted, so that what leads there is refused, too.

    Before Linux 6.4 (628bd3e49cba, "netfilter: nf_tables: drop map element references from preparation
    phase") a chain cannot be deleted in the transaction that deletes the last thing that goes there: it is
    emptied then. Not so where something was refused: that may be what goes there, and it is to continue.

    Raises NotFound where another program removed the table, and KernelError.
    """
    remaining = list(of)
    refused: dict[Key, KernelError] = {}
    emptied: list[str] = []
    surprising = False
    while refusals := session.commit([step.operation for step in remaining]):
        _check_table(session, table, remaining, refusals)
        omitted = {each.position for each in refusals if _is_needless(remaining, each)}
        real = [each for each in refusals if each.position not in omitted]
        busy = {each.position for each in real if _is_busy(remaining, each)}
        blamed: dict[Key, KernelError] = {}
        if without or refused or len(busy) < len(real):
            blamed = _blamed(remaining, [each for each in real if each.position not in busy] or real)
            surprising = surprising or any(each.errno in _SURPRISING for each in real)
        else:
            chains = (remaining[position].key for position in busy)
            emptied += [key.name for key in chains if isinstance(key, Chain)]
            omitted |= busy
        refused = blamed | refused
        remaining = list(_without(remaining, omitted, blamed))
        if abandoning:
            remaining = [*abandoned(table, blamed), *remaining]
    return Done(refused, emptied, surprising)


def _check_table(session: Session, table: Table, of: Sequence[Step], refusals: Sequence[Refusal]) -> None:
    """Where there is none, everything is refused, and nothing is known any more."""
    for each in refusals:
        if of[each.position].key is None:
            raise nft.failure(f"nftables: table {table}", each.errno, each.reason)
    expected = all(step.key is not None for step in of)
    missing = any(each.errno == errno.ENOENT for each in refusals)
    if expected and missing and table not in session.tables():
        raise NotFound(f"nftables: table {table} is gone: another program removed it")


def _is_needless(of: Sequence[Step], refusal: Refusal) -> bool:
    return of[refusal.position].needless and refusal.errno == errno.ENOENT


def _is_busy(of: Sequence[Step], refusal: Refusal) -> bool:
    """Whether a chain was not deleted, as something goes there."""
    return of[refusal.position].operation.kind is Kind.DELETE_CHAIN and refusal.errno == errno.EBUSY


def _blamed(of: Sequence[Step], refusals: Iterable[Refusal]) -> dict[Key, KernelError]:
    blamed: dict[Key, KernelError] = {}
    of_the_whole = False
    for each in refusals:
        key = of[each.position].key
        if key is None or (each.errno in _OF_THE_WHOLE and of_the_whole):
            continue
        of_the_whole = of_the_whole or each.errno in _OF_THE_WHOLE
        blamed.setdefault(key, nft.failure(f"nftables: {key}", each.errno, each.reason))
    return blamed


def _without(of: Sequence[Step], omitted: Collection[int], blamed: Collection[Key]) -> Iterable[Step]:
    for position, step in enumerate(of):
        if position not in omitted and (step.key is None or step.key not in blamed):
            yield step
