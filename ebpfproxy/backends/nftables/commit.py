"""Commits transactions without the parts that the kernel rejects."""

import errno
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ebpfproxy.backends.nftables.changes import Step, chain_deletions
from ebpfproxy.backends.nftables.entries import Chain, Key
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.nft import nft
from ebpfproxy.linux.nft.messages import Kind, Table
from ebpfproxy.linux.nft.nft import Rejection, Session

_CONFLICTS = frozenset({errno.EOPNOTSUPP, errno.ELOOP, errno.EMLINK})
"""Errors of incompatible chains. The kernel reports them for the rule that causes the conflict, and for all
later ones.
"""

_UNEXPECTED = frozenset({errno.ENOENT, errno.EEXIST, errno.EBUSY})
"""Errors that may mean that the table is not in the expected state."""


class CommitResult(NamedTuple):
    """The result of a commit.

    - `rejected`: the errors by key.
    - `emptied`: chains that could only be emptied, since something still jumps to them.
    - `is_unexpected`: a rejection may be due to a table that is not in the expected state.
    """

    rejected: dict[Key, KernelError]
    emptied: list[str]
    is_unexpected: bool


def commit_steps(
    session: Session,
    table: Table,
    steps: Iterable[Step],
    without: Collection[Key] = (),
    abandoning: bool = False,
) -> CommitResult:
    """Commit as many of these steps as the kernel accepts. Of a key with a rejected step, commit none.

    `without`: keys that were rejected before, for which there are no steps. With `abandoning`, a chain with a
    rejected rule is deleted, so that rules and elements that jump to it are rejected as well.

    Before Linux 6.4 (628bd3e49cba, "netfilter: nf_tables: drop map element references from preparation
    phase") a chain cannot be deleted in the transaction that deletes the last reference to it. Such a chain
    is only emptied. If something else was rejected, it is not emptied: the rejected object may be the one
    that jumps to it, and must continue to work.

    Raises NotFound if another program removed the table, and KernelError.
    """
    remaining = list(steps)
    rejected: dict[Key, KernelError] = {}
    emptied: list[str] = []
    unexpected = False
    while rejections := session.commit([step.operation for step in remaining]):
        _check_table(session, table, remaining, rejections)
        omitted = {each.position for each in rejections if _is_absent(remaining, each)}
        real = [each for each in rejections if each.position not in omitted]
        busy = {each.position for each in real if _is_busy(remaining, each)}
        blamed: dict[Key, KernelError] = {}
        if without or rejected or len(busy) < len(real):
            blamed = _blamed(remaining, [each for each in real if each.position not in busy] or real)
            unexpected = unexpected or any(each.errno in _UNEXPECTED for each in real)
        else:
            chains = (remaining[position].key for position in busy)
            emptied += [key.name for key in chains if isinstance(key, Chain)]
            omitted |= busy
        rejected = blamed | rejected
        remaining = list(_without(remaining, omitted, blamed))
        if abandoning:
            remaining = [*chain_deletions(table, blamed), *remaining]
    return CommitResult(rejected, emptied, unexpected)


def _check_table(
    session: Session, table: Table, steps: Sequence[Step], rejections: Sequence[Rejection]
) -> None:
    """Raise if the table does not exist: then everything is rejected, and the state is unknown."""
    for each in rejections:
        if steps[each.position].key is None:
            raise nft.failure(f"nftables: table {table}", each.errno, each.reason)
    expected = all(step.key is not None for step in steps)
    missing = any(each.errno == errno.ENOENT for each in rejections)
    if expected and missing and table not in session.tables():
        raise NotFound(f"nftables: cannot change table {table}: another program removed it")


def _is_absent(steps: Sequence[Step], rejection: Rejection) -> bool:
    return steps[rejection.position].may_be_absent and rejection.errno == errno.ENOENT


def _is_busy(steps: Sequence[Step], rejection: Rejection) -> bool:
    """Return whether a chain was not deleted because something jumps to it."""
    return steps[rejection.position].operation.kind is Kind.DELETE_CHAIN and rejection.errno == errno.EBUSY


def _blamed(steps: Sequence[Step], rejections: Iterable[Rejection]) -> dict[Key, KernelError]:
    blamed: dict[Key, KernelError] = {}
    conflict_blamed = False
    for each in rejections:
        key = steps[each.position].key
        if key is None or (each.errno in _CONFLICTS and conflict_blamed):
            continue
        conflict_blamed = conflict_blamed or each.errno in _CONFLICTS
        blamed.setdefault(key, nft.failure(f"nftables: {key}", each.errno, each.reason))
    return blamed


def _without(steps: Sequence[Step], omitted: Collection[int], blamed: Collection[Key]) -> Iterable[Step]:
    for position, step in enumerate(steps):
        if position not in omitted and (step.key is None or step.key not in blamed):
            yield step
