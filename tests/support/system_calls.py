"""How often bpf(2) is called: what would take long is counted in tests, not timed."""

from collections.abc import Callable

import pytest

from ebpfproxy.linux.bpf import bpf


def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """From now on; what is returned says how many there were."""
    number = bpf.syscall_number()
    made: list[int] = []

    def noted() -> int:
        made.append(number)
        return number

    monkeypatch.setattr(bpf, "syscall_number", noted)
    return lambda: len(made)
