"""What an errno of bpf(2) becomes."""

import contextlib
import ctypes
import errno
import os
import struct
from typing import Any

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


class _FailingBatches:
    """A libc whose kernel has no memory in the first batch, which it fills up to `begun` entries.

    `begun` is None if the kernel cannot begin, and is older than 6.8: it then leaves the field `count` as it
    is. `written`: the keys that it has, which have four bytes.
    """

    def __init__(self, begun: int | None) -> None:
        self._begun = begun
        self._fails = True
        self.written: list[bytes] = []

    def syscall(self, _number: int, command: int, buffer: "ctypes.Array[ctypes.c_char]", _size: int) -> int:
        if command != bpf.MAP_UPDATE_BATCH:
            return 0
        (keys,), (count,) = struct.unpack_from("=Q", buffer, 16), struct.unpack_from("=I", buffer, 32)
        handled = (self._begun or 0) if self._fails else count
        if not self._fails or self._begun is not None:
            struct.pack_into("=I", buffer, 32, handled)
        self.written += [ctypes.string_at(keys + 4 * at, 4) for at in range(handled)]
        failed, self._fails = self._fails, False
        ctypes.set_errno(errno.ENOMEM)
        return -1 if failed else 0


@pytest.mark.parametrize("begun", [None, 0, 1, 9])
def test_a_batch_that_failed_for_lack_of_memory_is_completed(
    begun: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by fault injection: on Linux before 6.8 the agent took a batch that had not begun for written."""
    libc: Any = _FailingBatches(begun)
    monkeypatch.setattr(bpf, "_libc", libc)
    monkeypatch.setattr("ebpfproxy.linux.bpf.bpf.time.sleep", lambda _: None)
    keys = [number.to_bytes(4) for number in range(10)]
    with contextlib.closing(bpf.Map(os.open("/dev/null", os.O_RDONLY), "services")) as services:
        services.update_all([(key, b"value") for key in keys])
    assert libc.written == keys
