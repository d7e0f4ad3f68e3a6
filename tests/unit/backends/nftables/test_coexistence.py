"""Whether the version of nft and of the kernel allow `auto` to select nftables, as in kube-proxy."""

from pathlib import Path

import pytest

from ebpfproxy.backends.nftables import coexistence
from ebpfproxy.linux import tools
from ebpfproxy.linux.nft import tool
from ebpfproxy.linux.nft.tool import Version


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder in PATH, without a tool. The kernel is a recent one."""
    monkeypatch.setattr(tools, "FOLDERS", str(tmp_path))
    monkeypatch.delenv(coexistence.SKIP, raising=False)
    kernel(monkeypatch, (6, 1, 0))
    return tmp_path


def kernel(monkeypatch: pytest.MonkeyPatch, version: Version) -> None:
    monkeypatch.setattr(tool, "linux", lambda: version)


def install(folder: Path, *lines: str) -> None:
    """Install an nft that runs these lines."""
    tool = folder / "nft"
    tool.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    tool.chmod(0o755)


def test_without_nft_only_the_kernel_version_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool.installed() is None
    assert coexistence.nft_tool().present
    kernel(monkeypatch, (5, 12, 19))
    found = coexistence.nft_tool()
    assert (found.present, found.needed) == (False, True)
    assert "Linux 5.12.19" in found.missing
    assert coexistence.SKIP in found.remedy
    kernel(monkeypatch, (5, 13, 0))
    assert coexistence.nft_tool().present


def test_kube_proxys_variable_skips_the_version_of_the_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(monkeypatch, (4, 18, 0))
    monkeypatch.setenv(coexistence.SKIP, "")
    assert not coexistence.nft_tool().present
    monkeypatch.setenv(coexistence.SKIP, "1")
    assert coexistence.nft_tool().present


@pytest.mark.parametrize(
    ("version", "present"),
    [("0.9.8", False), ("1.0.0", False), ("1.0.1", True), ("1.0.6", True), ("1.1", True)],
)
def test_nft_before_1_0_1_excludes_the_mode_on_any_kernel(
    version: str, present: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(folder, f"echo 'nftables v{version} (Lester Gooch #5)'")
    monkeypatch.setenv(coexistence.SKIP, "1")
    found = coexistence.nft_tool()
    assert found.present is present
    if not present:
        assert f"nft {version}" in found.missing
        assert "1.0.1" in found.remedy


@pytest.mark.parametrize("lines", [("exit 1",), ("echo nonsense",), ("kill -9 $$",)])
def test_nft_without_a_readable_version_is_ignored(lines: tuple[str, ...], folder: Path) -> None:
    install(folder, *lines)
    assert tool.installed() is None
    assert coexistence.nft_tool().present
