"""What an errno of a probe's load says of the kernel, and what it says nothing of."""

import errno
import os

import pytest

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import bpf


class Kernel:
    """Answers PROG_LOAD with one errno after another, then with a file descriptor."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    def __call__(self, command: int, attr: bytes, what: str) -> tuple[int, bytes]:
        assert command == bpf.PROG_LOAD
        if self.errors:
            raise bpf.error(self.errors.pop(0), what)
        return os.open(os.devnull, os.O_RDONLY), attr


def loads(monkeypatch: pytest.MonkeyPatch, *errors: int) -> bool:
    monkeypatch.setattr(bpf, "bpf", Kernel(*errors))
    return bpf.loads(18, 10, bytes(16))


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EACCES, errno.E2BIG, bpf.ENOTSUPP])
def test_a_program_that_the_kernel_rejects_does_not_load(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert not loads(monkeypatch, number)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_a_load_without_permission_or_resources_raises(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with pytest.raises(KernelError) as caught:
        loads(monkeypatch, number)
    assert bpf.errno_of(caught.value) == number


def test_an_interrupted_load_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loads(monkeypatch, errno.EAGAIN, errno.EAGAIN)
    assert not loads(monkeypatch, errno.EAGAIN, errno.EINVAL)


def test_a_load_that_is_interrupted_at_every_attempt_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError) as caught:
        loads(monkeypatch, *[errno.EAGAIN] * 10)
    assert bpf.errno_of(caught.value) == errno.EAGAIN
