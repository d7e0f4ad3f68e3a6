"""The result of a transaction of which the kernel rejects parts, with a fake kernel."""

import errno
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from ebpfproxy.backends.nftables.changes import Step
from ebpfproxy.backends.nftables.commit import CommitResult, commit_steps
from ebpfproxy.backends.nftables.entries import Chain, Element, Key
from ebpfproxy.errors import NotFound, Rejected, Unsupported
from ebpfproxy.linux.nft import messages
from ebpfproxy.linux.nft.messages import Kind, Operation, Table
from ebpfproxy.linux.nft.nft import Rejection, Session
from ebpfproxy.model.address import Family

TABLE = Table("ip", "kube-proxy")
A, B, C = (Chain(Family.IPV4, name) for name in "abc")
FRONTEND = Element(Family.IPV4, "service-ips", "10.96.0.1 . tcp . 80")

Verdicts = Callable[[Sequence[Operation]], dict[int, int]]


class Kernel:
    """Rejects the operations at the positions that `verdicts` returns, each with an errno."""

    def __init__(self, verdicts: Verdicts, tables: Sequence[Table] = (TABLE,)) -> None:
        self._verdicts = verdicts
        self._tables = list(tables)
        self.attempts: list[list[Operation]] = []

    def commit(self, operations: Sequence[Operation]) -> list[Rejection]:
        self.attempts.append(list(operations))
        found = self._verdicts(operations)
        return [Rejection(position, number, "") for position, number in sorted(found.items())]

    def tables(self) -> list[Table]:
        return self._tables


def put(key: Chain) -> Step:
    return Step(messages.add_chain(TABLE, key.name), key)


def flush(key: Chain) -> Step:
    return Step(messages.flush_chain(TABLE, key.name), key, may_be_absent=True)


def drop(key: Chain) -> Step:
    return Step(messages.delete_chain(TABLE, key.name), key, may_be_absent=True)


def run(kernel: Kernel, *steps: Step, **options: Any) -> CommitResult:
    return commit_steps(cast(Session, kernel), TABLE, steps, **options)


def rejecting(*rejected: tuple[Kind, Key, int]) -> Verdicts:
    """Reject these operations on these chains."""
    by_body = {
        (kind, put(key).operation.body if kind is Kind.NEW_CHAIN else drop(key).operation.body): number
        for kind, key, number in rejected
        if isinstance(key, Chain)
    }
    return lambda operations: {
        position: by_body[each.kind, each.body]
        for position, each in enumerate(operations)
        if (each.kind, each.body) in by_body
    }


def test_an_accepted_transaction_is_committed_once() -> None:
    kernel = Kernel(rejecting())
    assert run(kernel, put(A), put(B)) == CommitResult({}, [], False)
    assert len(kernel.attempts) == 1


def test_all_steps_are_committed_but_those_of_a_rejected_key() -> None:
    kernel = Kernel(rejecting((Kind.NEW_CHAIN, B, errno.EINVAL)))
    done = run(kernel, flush(A), flush(B), put(A), put(B), put(C))
    assert {key: str(error) for key, error in done.rejected.items()} == {
        B: "nftables: ip chain b: Invalid argument"
    }
    assert isinstance(done.rejected[B], Rejected)
    assert kernel.attempts[-1] == [each.operation for each in (flush(A), put(A), put(C))]


def test_deleting_an_absent_chain_is_no_error() -> None:
    kernel = Kernel(rejecting((Kind.DELETE_CHAIN, A, errno.ENOENT)))
    assert run(kernel, drop(A), put(B)) == CommitResult({}, [], False)
    assert kernel.attempts[-1] == [put(B).operation]


def test_a_kernel_that_cannot_delete_a_chain_yet_empties_it() -> None:
    kernel = Kernel(rejecting((Kind.DELETE_CHAIN, A, errno.EBUSY), (Kind.DELETE_CHAIN, B, errno.ENOENT)))
    assert run(kernel, flush(A), put(C), drop(A), drop(B)) == CommitResult({}, ["a"], False)
    assert kernel.attempts[-1] == [each.operation for each in (flush(A), put(C))]


def test_a_chain_that_a_rejected_one_may_jump_to_stays_unchanged() -> None:
    kernel = Kernel(rejecting((Kind.DELETE_CHAIN, A, errno.EBUSY), (Kind.NEW_CHAIN, B, errno.EINVAL)))
    done = run(kernel, flush(A), flush(B), put(B), put(C), drop(A))
    assert done.rejected.keys() == {A, B}
    assert done.emptied == []
    assert kernel.attempts[-1] == [put(C).operation]


def test_a_chain_that_a_previously_rejected_one_may_jump_to_stays_unchanged() -> None:
    kernel = Kernel(rejecting((Kind.DELETE_CHAIN, A, errno.EBUSY)))
    assert run(kernel, flush(A), put(C), drop(A), without=[B]).rejected.keys() == {A}
    assert kernel.attempts[-1] == [put(C).operation]


def test_only_the_first_of_incompatible_chains_is_rejected() -> None:
    """After a rule that makes chains incompatible, the kernel rejects all later ones."""

    def verdicts(operations: Sequence[Operation]) -> dict[int, int]:
        bad = [position for position, each in enumerate(operations) if each.body == put(B).operation.body]
        return dict.fromkeys(range(bad[0], len(operations)), errno.EOPNOTSUPP) if bad else {}

    done = run(Kernel(verdicts), put(A), put(B), put(C))
    assert done.rejected.keys() == {B}
    assert isinstance(done.rejected[B], Unsupported)


def test_a_rejected_new_chain_is_deleted_so_that_nothing_jumps_to_it() -> None:
    kernel = Kernel(rejecting((Kind.NEW_CHAIN, A, errno.EINVAL)))
    done = run(kernel, put(A), put(B), abandoning=True)
    assert done.rejected.keys() == {A}
    assert kernel.attempts[-1] == [each.operation for each in (drop(A), put(B))]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EBUSY, errno.EEXIST])
def test_a_rejection_that_another_program_may_have_caused_is_unexpected(number: int) -> None:
    kernel = Kernel(rejecting((Kind.NEW_CHAIN, A, number)))
    assert run(kernel, put(A), put(B)).is_unexpected


def test_a_removed_table_is_an_error() -> None:
    kernel = Kernel(rejecting((Kind.NEW_CHAIN, A, errno.ENOENT)), tables=())
    with pytest.raises(NotFound, match="cannot change table ip kube-proxy: another program removed it"):
        run(kernel, put(A))


def test_a_table_that_cannot_be_created_is_an_error() -> None:
    step = Step(messages.add_table(TABLE), None)
    with pytest.raises(Rejected, match="table ip kube-proxy: Invalid"):
        run(Kernel(lambda operations: {0: errno.EINVAL}), step, put(A))
