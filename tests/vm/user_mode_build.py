"""Build a kernel that is a program of this machine (user-mode Linux), from Debian's source package."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.vm.cache import Installed, Unavailable, output, put

PROGRAMS = {
    "make": "make",
    "gcc": "gcc",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "tar": "tar",
    "xz": "xz-utils",
    "depmod": "kmod",
}
"""The needed programs, and Debian's packages."""
_TICKS = ("config HZ\n\tint\n\tdefault 100\n", "config HZ\n\tint\n\tdefault 250\n")
"""In user mode the timer's frequency is not an option. With 250 Hz, as in Debian's kernels, timeouts are
rounded to 4 ms, not to 10 ms."""
_STEP = 500
"""The number of files between two messages."""


def build_id(config: Path) -> str:
    """Identifies the build's result, together with the version of the source: a part of the release."""
    return hashlib.sha256("".join((config.read_text(), *_TICKS)).encode()).hexdigest()[:8]


def check_tools() -> None:
    """Raises Unavailable if a program that the build needs is missing."""
    missing = {name: package for name, package in PROGRAMS.items() if shutil.which(name) is None}
    if missing:
        lack = f"cannot build a kernel for user mode: no program {', '.join(missing)}"
        raise Unavailable(f"{lack}: apt-get install {' '.join(missing.values())}")


def built(unpacked: Path, config: Path) -> Installed:
    """Build the kernel in the folder of the unpacked source package, and put it into the cache: some minutes.

    Raises Unavailable if the compiler fails, and ValueError if options of `config` have no effect.
    """
    (archive,) = unpacked.glob("usr/src/linux-source-*.tar.xz")
    _show(f"unpacking {archive.name}")
    output("tar", "-xf", archive.name, cwd=archive.parent)
    source = archive.parent / archive.name.removesuffix(".tar.xz")
    _set_ticks(source / "arch" / "um" / "Kconfig")
    make = ("make", "ARCH=um", f"LOCALVERSION=-um-{build_id(config)}")
    output(*make, f"KCONFIG_ALLCONFIG={config}", "allnoconfig", cwd=source)
    if without_effect := ineffective(config.read_text(), (source / ".config").read_text()):
        raise ValueError(f"{config}: options without effect: {' '.join(without_effect)}")
    release = output(*make, "-s", "kernelrelease", cwd=source).strip()
    _show(f"compiling Linux {release} for user mode: some minutes, once for each configuration")
    _compile((*make, f"-j{len(os.sched_getaffinity(0))}", "linux"), source)
    new = unpacked.with_name("new")
    modules = new / "lib" / "modules" / release
    modules.mkdir(parents=True)
    output("strip", "-o", str(new / "linux"), str(source / "linux"))
    # All modules are built in. With these lists modprobe succeeds for them.
    for name in ("modules.builtin", "modules.builtin.modinfo"):
        shutil.copy(source / name, modules)
    (modules / "modules.order").touch()
    return put(new, release)


def ineffective(wanted: str, result: str) -> list[str]:
    """The options of a configuration that are different or missing in the result, such as those whose
    dependencies are missing."""
    set_there = set(re.findall("^CONFIG_.*", result, re.MULTILINE))
    return [option for option in re.findall("^CONFIG_.*", wanted, re.MULTILINE) if option not in set_there]


def _set_ticks(kconfig: Path) -> None:
    text = kconfig.read_text()
    old, new = _TICKS
    if old not in text:
        raise ValueError(f"{kconfig}: HZ is not declared as expected")
    kconfig.write_text(text.replace(old, new))


def _compile(command: tuple[str, ...], source: Path) -> None:
    with (source / "messages").open("w+") as messages:
        make = subprocess.Popen(command, cwd=source, stdout=subprocess.PIPE, stderr=messages, text=True)
        with make:
            assert make.stdout is not None
            for number, _ in enumerate(make.stdout, 1):
                if number % _STEP == 0:
                    _show(f"compiled {number} files")
        messages.seek(0)
        if make.returncode:
            raise Unavailable(f"make: {messages.read().strip()[-2000:]}")


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
