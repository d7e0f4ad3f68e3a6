"""Debian's kernels, fetched by apt into a separate cache. The machine's apt state is neither used nor
changed."""

import fcntl
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.vm import user_mode_build
from tests.vm.cache import Installed, Unavailable, cache, output, put
from tests.vm.kernels import Kernel

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_DEPENDENCY = re.compile(r"\b(linux-(?:image|binary|modules|base|source)-\d\S*) \(= ([^)]+)\)")


def installed(kernel: Kernel, *, refresh: bool = False) -> Installed:
    """The kernel. It is fetched if the cache has none of its suite, and updated with `refresh`.

    Raises Unavailable.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = cache() / _key(kernel)
        if refresh or not known.is_dir():
            fetched = _fetch(kernel)
            known.unlink(missing_ok=True)
            known.symlink_to(fetched.folder.name)
        return Installed(known.resolve())


def _key(kernel: Kernel) -> str:
    parts = [kernel.suite, kernel.package]
    return ".".join([*parts, user_mode_build.build_id(kernel.config)] if kernel.config else parts)


def _fetch(kernel: Kernel) -> Installed:
    if kernel.config:
        user_mode_build.check_tools()
    with _apt(kernel.suite) as (apt, work):
        about = output(*apt("apt-cache"), "show", "--no-all-versions", kernel.package)
        wanted: dict[str, str] = {}
        _follow(about, wanted, apt)
        if not wanted:
            raise Unavailable(f"{kernel.package} of {kernel.suite} depends on no kernel:\n{about}")
        named = [f"{package}={version}" for package, version in wanted.items()]
        print(f"downloading {' '.join(wanted)}", file=sys.stderr, flush=True)
        output(*apt("apt-get"), "-qq", "download", *named, cwd=work)
        for package in work.glob("*.deb"):
            output("dpkg", "-x", str(package), str(work / "unpacked"))
        if kernel.config:
            return user_mode_build.built(work / "unpacked", kernel.config)
        return _put(work / "unpacked")


def _put(unpacked: Path) -> Installed:
    """Move the kernel to the cache. Debian has it in /boot or, in later releases, in /usr/lib/modules."""
    (modules,) = (*unpacked.glob("lib/modules/*"), *unpacked.glob("usr/lib/modules/*"))
    (image,) = (*unpacked.glob("boot/vmlinuz-*"), *modules.glob("vmlinuz"))
    release = modules.name
    new = unpacked.with_name("new")
    (new / "lib" / "modules").mkdir(parents=True)
    image.rename(new / "vmlinuz")
    modules.rename(new / "lib" / "modules" / release)
    return put(new, release)


def _follow(about: str, wanted: dict[str, str], apt: "_Apt") -> None:
    """Add to `wanted` the packages that a description depends on, recursively."""
    for package, version in _DEPENDENCY.findall(about):
        if package not in wanted:
            wanted[package] = version
            _follow(output(*apt("apt-cache"), "show", f"{package}={version}"), wanted, apt)


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
        output(*apt("apt-get"), "-qq", "update")
        yield apt, folder / "work"


def _mirror() -> str:
    """The address of Debian's archive that this machine's apt is configured for."""
    wanted = ("Created-By: Packages", "Component: main", "Label: Debian")
    lines = output("apt-get", "indextargets", "--format", "$(REPO_URI)", *wanted).split()
    if not lines:
        raise Unavailable("apt knows no archive of Debian's here; on Debian: apt-get update")
    return lines[0]
