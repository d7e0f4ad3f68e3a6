"""Whether KVM runs a kernel on this machine, or QEMU must emulate its instructions.

A device node is not enough. On some machines that have one, QEMU aborts or a guest hangs before its first
line. So a guest is tried once, and the result is remembered.
"""

import contextlib
import enum
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tests.vm.cache import Installed, Unavailable, cache, output

QEMU = "qemu-system-x86_64"
ENDS_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
"""The beginning of a command that is killed when its parent ends."""
DEVICE = Path("/dev/kvm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
DEADLINE_S = 10.0
"""The time for a guest's first line. It takes about a second if KVM works."""

_FIRST_LINE = "Linux version"
_APPEND = "console=ttyS0 loglevel=7 panic=-1"  # the first line has level 5


class Accelerator(enum.StrEnum):
    KVM = "KVM"
    SOFTWARE = "software emulation"
    NONE = "user mode"

    @property
    def options(self) -> tuple[str, ...]:
        """QEMU's options for the machine and its CPU."""
        if self is Accelerator.KVM:
            return ("-machine", "q35,accel=kvm", "-cpu", "host")
        # Without a fifth level of page tables, and without vector instructions, a quarter less is emulated.
        return ("-machine", "q35,accel=tcg", "-cpu", "max,la57=off,avx=off,avx2=off")

    def limit(self, seconds: float) -> float:
        """The time limit for what may take `seconds` in software emulation."""
        return seconds / 4 if self is Accelerator.KVM else seconds


def accelerator_of(kernel: Installed) -> Accelerator:
    """Raises Unavailable if the machine has no QEMU."""
    if kernel.user_mode:
        return Accelerator.NONE
    return Accelerator.SOFTWARE if why_not_kvm(kernel) else Accelerator.KVM


def why_no_device() -> str:
    """Why KVM cannot be opened; "" if it can. This takes no time."""
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return f"no {DEVICE}"
    except OSError as failure:
        return f"cannot open {DEVICE}: {failure.strerror}"
    return ""


def why_not_kvm(kernel: Installed) -> str:
    """Why KVM does not run this kernel, in one line; "" if it does.

    The first call boots a guest. Other processes wait for the result. It is valid until the machine restarts
    or has another version of QEMU. Raises Unavailable if the machine has no QEMU.
    """
    if shutil.which(QEMU) is None:
        raise Unavailable(f"no program {QEMU}: apt-get install qemu-system-x86")
    if lack := why_no_device():
        return lack
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "kvm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        valid_for = [BOOT_ID.read_text().strip(), output(QEMU, "--version").partition("\n")[0]]
        results = _remembered(valid_for)
        if kernel.release not in results:
            results[kernel.release] = _tried(kernel.image)
            _remember(valid_for, results)
        return results[kernel.release]


def _remembered(valid_for: list[str]) -> dict[str, str]:
    """By the kernel's release: why KVM does not run it."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        known = json.loads(_file().read_text())
        if known["valid_for"] == valid_for:
            results: dict[str, str] = known["results"]
            return results
    return {}


def _remember(valid_for: list[str], results: dict[str, str]) -> None:
    new = _file().with_suffix(".new")
    new.write_text(json.dumps({"valid_for": valid_for, "results": results}, indent=1))
    new.replace(_file())


def _file() -> Path:
    return cache() / "kvm.json"


def _tried(image: Path) -> str:
    """Boot a guest without a root file system, and kill it after its first line or the deadline."""
    command = [
        *ENDS_WITH_ITS_PARENT,
        *(QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *Accelerator.KVM.options,
        *("-m", "256M", "-kernel", str(image), "-append", _APPEND, "-serial", "stdio"),
    ]
    with tempfile.TemporaryDirectory(prefix="ebpfproxy-kvm-") as folder:
        console, messages = Path(folder, "console"), Path(folder, "messages")
        with console.open("wb") as out, messages.open("wb") as err:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            return _why_no_line(process, console, messages)
        finally:
            process.kill()
            process.wait()


def _why_no_line(process: subprocess.Popen[bytes], console: Path, messages: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        ended = process.poll()
        if _FIRST_LINE in console.read_text(errors="replace"):
            return ""
        if ended is not None:
            return f"QEMU ended with {_status(ended)}{_reason(messages.read_text(errors='replace'))}"
        if time.monotonic() > deadline:
            return f"a guest printed no line within {DEADLINE_S:g} s"
        time.sleep(0.05)


def _status(code: int) -> str:
    return f"status {code}" if code >= 0 else f"signal {-code}"


def _reason(messages: str) -> str:
    """The first line that is not a warning: what follows it is a failed assertion."""
    lines = [line for line in messages.splitlines() if line.strip() and "warning:" not in line]
    return f": {lines[0]}" if lines else ""
