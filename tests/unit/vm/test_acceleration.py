"""The trial of KVM with a script in place of QEMU."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm import acceleration
from tests.vm.acceleration import Accelerator, accelerator_of, why_no_device, why_not_kvm
from tests.vm.cache import Installed, Unavailable, cache

WORKS = "echo '[    0.000000] Linux version 6.1.0'; exec sleep 60"
ABORTS = "echo 'warning: no such feature' >&2; echo 'error: failed to set MSR 0x10a' >&2; kill -ABRT $$"
HANGS = "echo 'a line of the firmware'; exec sleep 60"

Machine = Callable[..., Path]
"""Puts a QEMU that runs a script, and the version in its name, on the machine. Returns the file with a line
for each guest that was started."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    guests = tmp_path / "guests"
    guests.touch()
    qemu = tmp_path / "bin" / acceleration.QEMU
    qemu.parent.mkdir()
    for name in ("DEVICE", "BOOT_ID"):
        (tmp_path / name).write_text("first boot\n")
        monkeypatch.setattr(acceleration, name, tmp_path / name)
    monkeypatch.setenv("PATH", f"{qemu.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(script: str, version: str = "7.2") -> Path:
        words = f'[ "$1" != --version ] || {{ echo "QEMU {version}"; exit; }}'
        qemu.write_text(f'#!/bin/sh\n{words}\necho "$@" >>{guests}\n{script}\n')
        qemu.chmod(0o755)
        return guests

    return put


@pytest.fixture
def kernel(tmp_path: Path) -> Installed:
    return Installed(tmp_path / "6.1.0-1-amd64")


def tries(guests: Path) -> int:
    return len(guests.read_text().splitlines())


def test_a_guest_that_prints_its_first_line_shows_that_kvm_works(machine: Machine, kernel: Installed) -> None:
    guests = machine(WORKS)
    assert why_not_kvm(kernel) == ""
    assert accelerator_of(kernel) is Accelerator.KVM
    assert f"accel=kvm -cpu host -m 256M -kernel {kernel.image} " in guests.read_text()


def test_the_reason_is_the_first_error_if_qemu_aborts(machine: Machine, kernel: Installed) -> None:
    machine(ABORTS)
    assert why_not_kvm(kernel) == "QEMU ended with signal 6: error: failed to set MSR 0x10a"
    assert accelerator_of(kernel) is Accelerator.SOFTWARE


def test_a_guest_without_a_line_of_its_kernel_is_killed_after_the_deadline(
    machine: Machine, kernel: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceleration, "DEADLINE_S", 0.2)
    machine(HANGS)
    assert why_not_kvm(kernel) == "a guest printed no line within 0.2 s"


@pytest.mark.parametrize("script", [WORKS, ABORTS])
def test_a_guest_is_tried_once(machine: Machine, kernel: Installed, script: str) -> None:
    guests = machine(script)
    assert why_not_kvm(kernel) == why_not_kvm(kernel)
    assert tries(guests) == 1


def test_another_kernel_is_tried_and_the_result_of_the_first_is_kept(
    machine: Machine, kernel: Installed
) -> None:
    guests = machine(WORKS)
    other = Installed(kernel.folder.with_name("6.12.0-1-amd64"))
    assert [why_not_kvm(each) for each in (kernel, other, kernel, other)] == [""] * 4
    assert tries(guests) == 2


def test_after_a_restart_of_the_machine_a_guest_is_tried_again(machine: Machine, kernel: Installed) -> None:
    machine(ABORTS)
    assert why_not_kvm(kernel)
    acceleration.BOOT_ID.write_text("second boot\n")
    guests = machine(WORKS)
    assert why_not_kvm(kernel) == ""
    assert tries(guests) == 2


def test_with_another_version_of_qemu_a_guest_is_tried_again(machine: Machine, kernel: Installed) -> None:
    machine(ABORTS)
    assert why_not_kvm(kernel)
    guests = machine(WORKS, "10.0")
    assert why_not_kvm(kernel) == ""
    assert tries(guests) == 2


def test_without_a_device_no_guest_is_tried(machine: Machine, kernel: Installed) -> None:
    guests = machine(WORKS)
    acceleration.DEVICE.unlink()
    assert why_not_kvm(kernel) == why_no_device() == f"no {acceleration.DEVICE}"
    assert tries(guests) == 0


def test_a_device_that_cannot_be_opened_is_a_reason(machine: Machine, kernel: Installed) -> None:
    machine(WORKS)
    acceleration.DEVICE.unlink()
    acceleration.DEVICE.mkdir()  # root can open any file, but no folder for writing
    assert why_not_kvm(kernel) == f"cannot open {acceleration.DEVICE}: Is a directory"


def test_an_unreadable_result_is_ignored(machine: Machine, kernel: Installed) -> None:
    guests = machine(WORKS)
    assert why_not_kvm(kernel) == ""
    next(cache().glob("*.json")).write_text("{")
    assert why_not_kvm(kernel) == ""
    assert tries(guests) == 2


def test_without_qemu_the_message_names_its_package(
    machine: Machine, kernel: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(Unavailable, match=r"no program qemu-system-x86_64: apt-get install qemu-system-x86$"):
        accelerator_of(kernel)


def test_a_kernel_for_user_mode_needs_no_qemu(machine: Machine, kernel: Installed) -> None:
    kernel.folder.mkdir()
    kernel.program.touch()
    guests = machine(WORKS)
    assert accelerator_of(kernel) is Accelerator.NONE
    assert tries(guests) == 0


def test_the_time_limit_is_shorter_with_kvm() -> None:
    assert Accelerator.KVM.limit(2400) < Accelerator.SOFTWARE.limit(2400) == Accelerator.NONE.limit(2400)
