"""What is built for user mode and how it is started, without a build."""

from pathlib import Path

import pytest

from tests.vm import user_mode_build
from tests.vm.acceleration import accelerator_of
from tests.vm.cache import Installed, Unavailable
from tests.vm.kernels import kernels
from tests.vm.start import start_command
from tests.vm.user_mode_build import build_id, check_tools, ineffective


def test_a_changed_configuration_is_another_build(tmp_path: Path) -> None:
    config = kernels()["user-mode"].config
    assert config is not None
    copy = tmp_path / "copy"
    copy.write_text(config.read_text())
    assert build_id(copy) == build_id(config)
    copy.write_text(config.read_text() + "CONFIG_NTFS3_FS=y\n")
    assert build_id(copy) != build_id(config)


def test_an_option_whose_dependencies_are_missing_is_without_effect() -> None:
    wanted = "# Devices.\nCONFIG_VETH=y\nCONFIG_GENEVE=y\nCONFIG_NR_CPUS=8\n"
    result = "CONFIG_VETH=y\n# CONFIG_GENEVE is not set\nCONFIG_NR_CPUS=1\n"
    assert ineffective(wanted, result) == ["CONFIG_GENEVE=y", "CONFIG_NR_CPUS=8"]


def test_missing_tools_are_reported_with_their_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in user_mode_build.PROGRAMS.keys() - {"bc", "xz"}:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"no program bc, xz: apt-get install bc xz-utils$"):
        check_tools()


def test_a_folder_with_a_program_is_started_without_qemu(tmp_path: Path) -> None:
    (tmp_path / "linux").touch()
    kernel = Installed(tmp_path)
    own = tmp_path / "scratch" / "vm"
    command = start_command(kernel, accelerator_of(kernel), own, cpus=1, memory_mib=300)
    assert str(tmp_path / "linux") in command
    assert {"mem=300M", "ncpus=1", f"hostfs_scratch={tmp_path / 'scratch'}"} <= set(command)
    assert not [word for word in command if "qemu" in word]
