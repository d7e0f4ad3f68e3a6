"""Settings below a folder that replaces /proc/sys."""

from pathlib import Path

import pytest

from ebpfproxy.errors import NotFound, Rejected
from ebpfproxy.linux import sysctl

NAME = "net/ipv4/conf/eth0.100/rp_filter"


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the value 0; its device has a dot in its name."""
    monkeypatch.setattr(sysctl, "ROOT", tmp_path)
    path = tmp_path / NAME
    path.parent.mkdir(parents=True)
    path.write_text("0\n")
    return path


def test_a_value_that_differs_is_set_and_one_that_does_not_is_not_written(setting: Path) -> None:
    assert sysctl.ensure(NAME, "2") is True
    assert sysctl.read(NAME) == "2"
    written = setting.stat().st_mtime_ns
    assert sysctl.ensure(NAME, "2") is False
    assert setting.stat().st_mtime_ns == written


def test_a_number_that_is_too_small_is_raised_and_one_that_is_larger_stays(setting: Path) -> None:
    assert sysctl.ensure_at_least(NAME, 2) is True
    assert sysctl.read(NAME) == "2"
    written = setting.stat().st_mtime_ns
    assert sysctl.ensure_at_least(NAME, 2) is False
    assert sysctl.ensure_at_least(NAME, 1) is False
    assert setting.stat().st_mtime_ns == written


def test_a_value_that_is_not_a_number_is_rejected(setting: Path) -> None:
    setting.write_text("4096\t16384\n")
    with pytest.raises(Rejected, match="rp_filter is not a number"):
        sysctl.ensure_at_least(NAME, 2)
    assert sysctl.read(NAME) == "4096\t16384"


def test_a_missing_setting_is_not_found(setting: Path) -> None:
    with pytest.raises(NotFound, match="net/ipv4/conf/gone/rp_filter"):
        sysctl.ensure("net/ipv4/conf/gone/rp_filter", "2")


def test_a_setting_that_cannot_be_read_is_rejected_with_its_name(setting: Path) -> None:
    with pytest.raises(Rejected, match="cannot read sysctl net/ipv4/conf"):
        sysctl.read("net/ipv4/conf")
