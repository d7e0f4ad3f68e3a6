"""The capabilities and the seccomp mode of the calling thread, from /proc."""

from pathlib import Path

import pytest

from ebpfproxy.errors import Rejected
from ebpfproxy.linux import capabilities


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "status"
    monkeypatch.setattr(capabilities, "_STATUS", path)
    return path


@pytest.mark.parametrize(
    ("mask", "held"),
    [
        ("0000000000000000", set()),
        ("0000000000001000", {capabilities.NET_ADMIN}),
        ("0000000000200000", {capabilities.SYS_ADMIN}),
        ("0000000000080000", {capabilities.SYS_PTRACE}),
        ("000000c000000000", {capabilities.BPF, capabilities.PERFMON}),
        (
            "000001ffffffffff",
            {
                capabilities.BPF,
                capabilities.NET_ADMIN,
                capabilities.NET_BIND_SERVICE,
                capabilities.PERFMON,
                capabilities.SYS_ADMIN,
                capabilities.SYS_PTRACE,
            },
        ),
    ],
)
def test_the_effective_capabilities_are_read_from_the_mask(status: Path, mask: str, held: set[str]) -> None:
    status.write_text(f"CapInh:\t000001ffffffffff\nCapEff:\t{mask}\nCapBnd:\t000001ffffffffff\n")
    assert capabilities.capabilities() == held


@pytest.mark.parametrize(("line", "filtered"), [("0", False), ("1", False), ("2", True)])
def test_a_seccomp_filter_is_detected(status: Path, line: str, filtered: bool) -> None:
    status.write_text(f"NoNewPrivs:\t0\nSeccomp:\t{line}\nSeccomp_filters:\t9\n")
    assert capabilities.is_filtered() == filtered


def test_a_kernel_without_seccomp_filters_nothing(status: Path) -> None:
    status.write_text("CapEff:\t0000000000000000\n")
    assert not capabilities.is_filtered()


def test_a_status_that_cannot_be_read_is_a_kernel_error(status: Path) -> None:
    """For example without a free file descriptor. It was an OSError, with a traceback in the log."""
    with pytest.raises(Rejected, match=f"cannot read {status}: No such file or directory"):
        capabilities.capabilities()
