"""Counts calls of bpf(2): tests of slow operations count calls instead of measuring time."""

from collections.abc import Callable

import pytest

from ebpfproxy.linux.bpf import bpf


def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count from now on. The returned function returns the number of calls."""
    number = bpf.syscall_number()
    made: list[int] = []

    def noted() -> int:
        made.append(number)
        return number

    monkeypatch.setattr(bpf, "syscall_number", noted)
    return lambda: len(made)
