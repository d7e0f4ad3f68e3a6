"""Reads a table of mounts. Tests that need the kernel are in tests/kernel."""

from pathlib import Path

import pytest

from ebpfproxy.errors import NotFound, Unsupported
from ebpfproxy.linux import mounts


def table(folder: Path, *lines: str) -> str:
    path = folder / "mounts"
    path.write_text("".join(f"{line} rw,relatime 0 0\n" for line in lines))
    return str(path)


def test_a_unified_layout_has_cgroup2_at_its_usual_place(tmp_path: Path) -> None:
    assert mounts.cgroup2_root(table(tmp_path, "proc /proc proc", "cgroup2 /none/cgroup cgroup2")) == Path(
        "/none/cgroup"
    )


def test_a_hybrid_layout_has_cgroup2_beside_the_controllers_of_v1(tmp_path: Path) -> None:
    lines = ["tmpfs /none tmpfs", "cgroup /none/cpu cgroup", "cgroup2 /none/unified cgroup2"]
    assert mounts.cgroup2_root(table(tmp_path, *lines)) == Path("/none/unified")


def test_a_mount_point_with_blanks_is_unescaped(tmp_path: Path) -> None:
    assert mounts.cgroup2_root(table(tmp_path, r"x /a\040b\134c cgroup2")) == Path("/a b\\c")


def test_without_cgroup2_the_error_says_how_to_mount_it(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        mounts.cgroup2_root(table(tmp_path, "cgroup /sys/fs/cgroup/cpu cgroup"))
    assert "mount -t cgroup2" in caught.value.hint


def test_without_access_to_the_cgroup_root_the_hint_names_the_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> Path:
        raise NotFound("cannot find the root of cgroup v2")

    monkeypatch.setattr(mounts, "host_cgroup2_root", nowhere)
    with pytest.raises(Unsupported, match="the sockets of other pods") as caught:
        mounts.cgroup_root_of_all()
    assert "--cgroup-root" in caught.value.hint


def test_a_folder_of_another_file_system_is_not_a_cgroup_root(tmp_path: Path) -> None:
    assert not mounts.is_true_cgroup_root(tmp_path)
    assert not mounts.is_true_cgroup_root(tmp_path / "missing")


def test_a_folder_of_another_file_system_is_not_on_a_bpffs(tmp_path: Path) -> None:
    assert not mounts.is_bpffs(tmp_path)
    assert not mounts.is_bpffs(tmp_path / "missing")
