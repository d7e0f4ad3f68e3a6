"""What an errno of bpf(2) becomes."""

import errno
import os

import pytest

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, TableFull, Unsupported
from ebpfproxy.linux.bpf import bpf


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, NotFound),
        (errno.EEXIST, AlreadyExists),
        (errno.E2BIG, TableFull),
        (errno.ENOSYS, Unsupported),
        (errno.EOPNOTSUPP, Unsupported),
        (bpf.ENOTSUPP, Unsupported),
        (errno.EINVAL, Rejected),
        (errno.ENOSPC, Rejected),
        (errno.EPERM, Rejected),
        (12345, Rejected),
    ],
)
def test_each_errno_becomes_its_error_class(number: int, kind: type[KernelError]) -> None:
    failure = bpf.error(number, "cannot write map services")
    assert type(failure) is kind
    assert failure.message.startswith("cannot write map services: ")
    assert bpf.errno_of(failure) == number


def test_enotsupp_has_a_readable_message() -> None:
    assert bpf.error(bpf.ENOTSUPP, "x").message == "x: not supported"
    assert bpf.error(errno.ENOENT, "x").message == f"x: {os.strerror(errno.ENOENT)}"


def test_eperm_has_a_hint_with_the_required_capabilities() -> None:
    assert "CAP_BPF" in bpf.error(errno.EPERM, "x").hint
    assert bpf.error(errno.EINVAL, "x").hint == ""


def test_an_error_of_another_origin_has_no_errno() -> None:
    assert bpf.errno_of(KernelError("x")) == 0


def test_a_machine_without_a_known_system_call_number_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "pdp11")
    with pytest.raises(Unsupported, match="pdp11"):
        bpf.bpf(bpf.MAP_LOOKUP_ELEM, bytes(32), "x")


def test_a_map_that_cannot_be_described_is_closed() -> None:
    """Found by fault injection: each failed attempt to open the maps left a file descriptor open."""
    opened = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(KernelError):
        bpf.Map(opened, "no map")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened)
