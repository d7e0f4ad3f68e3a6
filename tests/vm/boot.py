"""Run one command of this checkout under another kernel:

    python -m tests.vm.boot 6.1 --modules ip_vs,dummy -- .venv/bin/python -m pytest tests/kernel/test_tc.py

The VM has this machine's root file system read-only, below a layer in memory. The command's files are lost at
the end, except those in the folder $SCRATCH. The only network is loopback.

The kernel `user-mode` is a program of this machine. In this folder it is called a VM, too.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.vm.acceleration import Accelerator, accelerator_of, why_not_kvm
from tests.vm.cache import Installed, Unavailable
from tests.vm.debian import installed
from tests.vm.initramfs import initramfs
from tests.vm.kernels import kernels
from tests.vm.start import start_command

_GUEST = Path(__file__).parent / "guest"
_INHERITED = ("PATH", "PYTHONPATH", "PYTEST_ADDOPTS", "LANG")
_ENVIRONMENT = {
    "HOME": "/root",
    "SCRATCH": "/run/scratch",
    "CI": "true",  # a test that cannot run in a VM fails, unless the table of kernels lists it
    # The search and import of all plugins takes ten seconds in a VM.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "pytest_timeout",
}


@dataclass(frozen=True, slots=True)
class Order:
    """The command and the properties of a VM."""

    command: Sequence[str]
    folder: Path = field(default_factory=Path.cwd)
    """The working directory of the command."""
    modules: Sequence[str] = ()
    """Kernel modules that are loaded before the command."""
    seconds: float = 600
    """The time after which the VM is killed."""
    memory_mib: int = 2048
    cpus: int = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int | None
    """The command's exit status; None if the VM ended or was killed before the command ended."""
    output: str
    """Both output streams of the command, up to the end of the VM."""
    console: str
    """The kernel's messages."""
    boot_s: float
    """Seconds by the VM's clock until the command started; 0.0 if it never started."""
    took_s: float
    timed_out: bool
    accelerator: Accelerator

    def verdict(self) -> str:
        """One line; "" for a command that ended with status 0."""
        if self.status is not None:
            return f"the command ended with status {self.status}" if self.status else ""
        how = f"was ended after {self.took_s:.0f} s" if self.timed_out else f"ended after {self.took_s:.0f} s"
        last = self.console.rstrip().splitlines()[-5:]
        return "\n".join((f"the VM {how}, its command had not; its console's last lines:", *last))


def run(
    kernel: Installed, order: Order, scratch: Path, write: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Boot, run the command, and return when the VM has ended. `scratch` is the VM's $SCRATCH.

    `write` gets the output as it arrives. Raises Unavailable if no VM can run.
    """
    own = scratch / "vm"
    accelerator = accelerator_of(kernel)
    command = start_command(kernel, accelerator, own, order.cpus, order.memory_mib)
    own.mkdir()
    _write_orders(own, kernel, order)
    (own / "initramfs").write_bytes(initramfs(kernel))
    started = time.monotonic()
    with _running(command, own / "messages") as process:
        timed_out = not _follow(process, own / "output", started + order.seconds, write)
    (own / "initramfs").unlink()
    status, booted = _text(own / "status"), _text(own / "booted")
    return Outcome(
        int(status) if status.strip() else None,
        _text(own / "output"),
        _text(own / "console") + _text(own / "messages"),
        float(booted or 0),
        time.monotonic() - started,
        timed_out,
        accelerator,
    )


def _write_orders(own: Path, kernel: Installed, order: Order) -> None:
    settings = {"MODULES_FOLDER": str(kernel.modules), "MODULES": " ".join(order.modules)}
    (own / "settings").write_text("".join(f"{key}={shlex.quote(text)}\n" for key, text in settings.items()))
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    exports = "".join(
        f"export {key}={shlex.quote(text)}\n" for key, text in (environment | _ENVIRONMENT).items()
    )
    command = f"{exports}cd {shlex.quote(str(order.folder))} && exec {shlex.join(order.command)}\n"
    (own / "command").write_text(command)
    shutil.copy(_GUEST / "run", own / "run")


@contextlib.contextmanager
def _running(command: Sequence[str], messages: Path) -> Iterator[subprocess.Popen[bytes]]:
    with messages.open("wb") as stream:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _follow(
    process: subprocess.Popen[bytes], output: Path, deadline: float, write: Callable[[str], None]
) -> bool:
    """Whether the VM ended by itself, in time."""
    written = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        text = _text(output)
        write(text[written:])
        written = len(text)
        if process.returncode is not None:
            return True
        if time.monotonic() > deadline:
            return False


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm.boot", description="run a command in a VM")
    parser.add_argument("kernel", choices=kernels())
    parser.add_argument("--modules", default="", metavar="NAME,NAME", help="to load before")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS")
    parser.add_argument("--memory", type=int, default=2048, metavar="MIB")
    parser.add_argument("--cpus", type=int, default=2, help="one of them does where two VMs share two CPUs")
    parser.add_argument("--scratch", type=Path, help="a folder for what the command leaves in $SCRATCH")
    parser.add_argument("--console", action="store_true", help="show the kernel's messages at the end")
    if "--" not in sys.argv:
        parser.error("no command: -- COMMAND ...")
    end = sys.argv.index("--")
    arguments, command = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    modules = [name for name in arguments.modules.split(",") if name]
    order = Order(
        command, modules=modules, seconds=arguments.timeout, memory_mib=arguments.memory, cpus=arguments.cpus
    )
    with tempfile.TemporaryDirectory(prefix="ebpfproxy-vm-") as text:
        scratch = arguments.scratch or Path(text)
        try:
            kernel = installed(kernels()[arguments.kernel])
            outcome = run(kernel, order, scratch, lambda part: print(part, end="", flush=True))
        except Unavailable as lack:
            print(lack, file=sys.stderr)
            return 2
    if arguments.console:
        print(outcome.console, file=sys.stderr)
    verdict = outcome.verdict()
    how = str(outcome.accelerator)
    if outcome.accelerator is Accelerator.SOFTWARE:
        how += f" (no KVM: {why_not_kvm(kernel)})"
    times = f"booted in {outcome.boot_s:.0f} s, all in {outcome.took_s:.0f} s"
    line = f"kernel {kernel.release}, {how}: {times}"
    print(f"{line}; {verdict}" if verdict else line, file=sys.stderr)
    return 1 if outcome.status is None else outcome.status


if __name__ == "__main__":
    sys.exit(main())
