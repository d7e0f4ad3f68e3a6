"""Debian's kernels, fetched by apt into a separate cache. The machine's apt state is neither used nor
changed."""

import fcntl
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.vm.kernels import Kernel

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_DEPENDENCY = re.compile(r"\b(linux-(?:image|binary|modules|base)-\d\S*) \(= ([^)]+)\)")


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
        return self.folder / "vmlinuz"

    @property
    def modules(self) -> Path:
        return self.folder / "lib" / "modules" / self.release


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "ebpfproxy" / "kernels"


def installed(kernel: Kernel, *, refresh: bool = False) -> Installed:
    """The kernel. It is fetched if the cache has none of its suite, and updated with `refresh`.

    Raises Unavailable.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = cache() / f"{kernel.suite}.{kernel.package}"
        if refresh or not known.is_dir():
            fetched = _fetch(kernel)
            known.unlink(missing_ok=True)
            known.symlink_to(fetched.folder.name)
        return Installed(known.resolve())


def _fetch(kernel: Kernel) -> Installed:
    with _apt(kernel.suite) as (apt, work):
        about = _output(*apt("apt-cache"), "show", "--no-all-versions", kernel.package)
        wanted: dict[str, str] = {}
        _follow(about, wanted, apt)
        if not wanted:
            raise Unavailable(f"{kernel.package} of {kernel.suite} depends on no kernel:\n{about}")
        named = [f"{package}={version}" for package, version in wanted.items()]
        _output(*apt("apt-get"), "-qq", "download", *named, cwd=work)
        for package in work.glob("*.deb"):
            _output("dpkg", "-x", str(package), str(work / "unpacked"))
        return _put(work / "unpacked")


def _put(unpacked: Path) -> Installed:
    """Move the kernel to the cache. Debian has it in /boot or, in later releases, in /usr/lib/modules."""
    (modules,) = (*unpacked.glob("lib/modules/*"), *unpacked.glob("usr/lib/modules/*"))
    (image,) = (*unpacked.glob("boot/vmlinuz-*"), *modules.glob("vmlinuz"))
    put = Installed(cache() / modules.name)
    new = unpacked.with_name("new")
    (new / "lib" / "modules").mkdir(parents=True)
    image.rename(new / "vmlinuz")
    modules.rename(new / "lib" / "modules" / put.release)
    _output("depmod", "-b", str(new), put.release)
    if not put.folder.exists():
        new.rename(put.folder)
    return put


def _follow(about: str, wanted: dict[str, str], apt: "_Apt") -> None:
    """Add to `wanted` the packages that a description depends on, recursively."""
    for package, version in _DEPENDENCY.findall(about):
        if package not in wanted:
            wanted[package] = version
            _follow(_output(*apt("apt-cache"), "show", f"{package}={version}"), wanted, apt)


class _Apt:
    """The beginning of apt command lines with the state in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, program: str) -> list[str]:
        settings = {
            "Dir::State": self._folder / "state",
            "Dir::State::status": "/dev/null",
            "Dir::Cache": self._folder / "cache",
            "Dir::Etc::sourcelist": self._folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Acquire::Languages": "none",
            "APT::Sandbox::User": "root",
        }
        return [program, *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]


@contextmanager
def _apt(suite: str) -> Iterator[tuple[_Apt, Path]]:
    with tempfile.TemporaryDirectory(dir=cache(), prefix="fetch-") as text:
        folder = Path(text)
        (folder / "state" / "lists" / "partial").mkdir(parents=True)
        (folder / "cache" / "archives" / "partial").mkdir(parents=True)
        (folder / "work").mkdir()
        source = f"deb [signed-by={_KEYRING}] {_mirror()} {suite} main\n"
        (folder / "sources.list").write_text(source)
        apt = _Apt(folder)
        _output(*apt("apt-get"), "-qq", "update")
        yield apt, folder / "work"


def _mirror() -> str:
    """The address of Debian's archive that this machine's apt is configured for."""
    wanted = ("Created-By: Packages", "Component: main", "Label: Debian")
    lines = _output("apt-get", "indextargets", "--format", "$(REPO_URI)", *wanted).split()
    if not lines:
        raise Unavailable("apt knows no archive of Debian's here; on Debian: apt-get update")
    return lines[0]


def _output(*command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1800)
    except FileNotFoundError as lack:
        raise Unavailable(f"no program {command[0]}") from lack
    if done.returncode:
        raise Unavailable(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
