"""Transactions that come about: without what the kernel rejects of them."""

import errno
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ebpfproxy.backends.nftables.entries import Chain, Key
from ebpfproxy.backends.nftables.steps import Step, abandoned
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.nft import nft
from ebpfproxy.linux.nft.messages import Kind, Table
from ebpfproxy.linux.nft.nft import Rejection, Session

_OF_THE_WHOLE = frozenset({errno.EOPNOTSUPP, errno.ELOOP, errno.EMLINK})
"""What is said where chains do not fit together: of the rule that made it so, and of all after it."""

_SURPRISING = frozenset({errno.ENOENT, errno.EEXIST, errno.EBUSY})


class Done(NamedTuple):
    """`rejected` by key; `emptied`: chains that could only be emptied yet, since something still goes there.
    `is_surprising`: a rejection may come of a table that is not as it was thought to be."""

    rejected: dict[Key, KernelError]
    emptied: list[str]
    is_surprising: bool


def committed(
    session: Session,
    table: Table,
    of: Iterable[Step],
    without: Collection[Key] = (),
    abandoning: bool = False,
) -> Done:
    """Commit these steps, or as many as the kernel takes: of a key that is rejected, none.

    `without`: keys that were rejected before, so that no step is about them. With `abandoning` a chain of
    which a rule is rejected is deleted, so that what leads there is rejected, too.

    Before Linux 6.4 (628bd3e49cba, "netfilter: nf_tables: drop map element references from preparation
    phase") a chain cannot be deleted in the transaction that deletes the last thing that goes there: it is
    emptied then. Not so where something was rejected: that may be what goes there, and it is to continue.

    Raises NotFound where another program removed the table, and KernelError.
    """
    remaining = list(of)
    rejected: dict[Key, KernelError] = {}
    emptied: list[str] = []
    surprising = False
    while rejections := session.commit([step.operation for step in remaining]):
        _check_table(session, table, remaining, rejections)
        omitted = {each.position for each in rejections if _is_needless(remaining, each)}
        real = [each for each in rejections if each.position not in omitted]
        busy = {each.position for each in real if _is_busy(remaining, each)}
        blamed: dict[Key, KernelError] = {}
        if without or rejected or len(busy) < len(real):
            blamed = _blamed(remaining, [each for each in real if each.position not in busy] or real)
            surprising = surprising or any(each.errno in _SURPRISING for each in real)
        else:
            chains = (remaining[position].key for position in busy)
            emptied += [key.name for key in chains if isinstance(key, Chain)]
            omitted |= busy
        rejected = blamed | rejected
        remaining = list(_without(remaining, omitted, blamed))
        if abandoning:
            remaining = [*abandoned(table, blamed), *remaining]
    return Done(rejected, emptied, surprising)


def _check_table(session: Session, table: Table, of: Sequence[Step], rejections: Sequence[Rejection]) -> None:
    """Where there is none, everything is rejected, and nothing is known any more."""
    for each in rejections:
        if of[each.position].key is None:
            raise nft.failure(f"nftables: table {table}", each.errno, each.reason)
    expected = all(step.key is not None for step in of)
    missing = any(each.errno == errno.ENOENT for each in rejections)
    if expected and missing and table not in session.tables():
        raise NotFound(f"nftables: table {table} is gone: another program removed it")


def _is_needless(of: Sequence[Step], rejection: Rejection) -> bool:
    return of[rejection.position].needless and rejection.errno == errno.ENOENT


def _is_busy(of: Sequence[Step], rejection: Rejection) -> bool:
    """Whether a chain was not deleted, as something goes there."""
    return of[rejection.position].operation.kind is Kind.DELETE_CHAIN and rejection.errno == errno.EBUSY


def _blamed(of: Sequence[Step], rejections: Iterable[Rejection]) -> dict[Key, KernelError]:
    blamed: dict[Key, KernelError] = {}
    of_the_whole = False
    for each in rejections:
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
