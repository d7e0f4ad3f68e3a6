"""The cache of kernels."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


class Unavailable(Exception):
    """A kernel is not available on this machine; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A kernel in the cache."""

    folder: Path

    @property
    def release(self) -> str:
        """The output of `uname -r` with this kernel."""
        return self.folder.name

    @property
    def image(self) -> Path:
        """The kernel for a VM. A kernel for user mode has none."""
        return self.folder / "vmlinuz"

    @property
    def program(self) -> Path:
        """The kernel as a program of this machine. Only a kernel for user mode has one."""
        return self.folder / "linux"

    @property
    def user_mode(self) -> bool:
        return self.program.exists()

    @property
    def modules(self) -> Path:
        return self.folder / "lib" / "modules" / self.release


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ebpfproxy" / "kernels"


def put(new: Path, release: str) -> Installed:
    """Move a folder with a kernel and its modules to the cache, unless the cache has this release."""
    installed = Installed(cache() / release)
    output("depmod", "-b", str(new), release)
    if not installed.folder.exists():
        new.rename(installed.folder)
    return installed


def output(*command: str, cwd: Path | None = None) -> str:
    """The standard output. Raises Unavailable if the program is missing or fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1800)
    except FileNotFoundError as lack:
        raise Unavailable(f"no program {command[0]}") from lack
    if done.returncode:
        raise Unavailable(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
