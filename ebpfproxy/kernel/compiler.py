"""Compiling C and loading programs with bcc, in a child process that ends when that is done.

`build` is what others call; it runs this module as a program. The child alone imports bcc, so that the memory
of clang and LLVM (130 MB) goes with it. What it made lasts by its pins:

    <maps>/NAME          every map that the source declares, pinned by the source itself (PIN_DIR)
    <programs>/NAME      every program, appearing all at once

bcc comes from the distribution (python3-bpfcc), never from PyPI, where that name is another project's.
"""

import contextlib
import ctypes
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.errors import Rejected, Unsupported

_FLAGS = ("-Wall", "-Werror=implicit-function-declaration", "-I/usr/include", "-g0")
"""-g0: bcc asks for debug information, which takes a fifth of the compiler's time, and is used by nobody."""
_PR_SET_PDEATHSIG = 1
_CLANG_ERROR = ": error: "  # after the file, line and column
_LOCAL_INCLUDE = re.compile(r'#include "([^"/]+)"')


class ProgramSpec(NamedTuple):
    """A function of the source, and the kernel's BPF_PROG_TYPE_* and attach type (bpf_attach_type) for it."""

    name: str
    type: int
    attach_type: int


def build(
    source: Path,
    defines: Mapping[str, str],
    programs: tuple[ProgramSpec, ...],
    map_pins: Path,
    program_pins: Path,
    kept_open: tuple[int, ...] = (),
    beside: tuple[Path, ...] = (),
) -> None:
    """Compile `source`, load `programs`, pin them below `program_pins`, which must not exist yet.

    Sources `beside` it are compiled as one text with it, so that clang runs once, and maps that are not
    pinned are shared. Maps that are pinned, or linked, already below `map_pins` are used, without a check of
    their shape; `map_pins` may be inside NAME_partial, which becomes `program_pins` (NAME). The child has
    the file descriptors `kept_open`, too, so that a lock among them lasts as long as it runs; it ends with
    us, and leaves signals of the terminal to us.
    Raises Unsupported where bcc is missing or another package, Rejected where clang or the kernel says no.
    """
    request = {
        "sources": [str(source), *map(str, beside)],
        "defines": dict(defines),
        "programs": [list(program) for program in programs],
        "maps": str(map_pins),
        "pins": str(program_pins),
    }
    child, log = _run(json.dumps(request), kept_open)
    if child.returncode == 0:
        return
    lines = [line for line in log.splitlines() if line.strip()]
    ends = lines[-1] if lines else f"the compiler ended with {child.returncode}"
    reason = next((line for line in lines if _CLANG_ERROR in line), ends)
    if child.returncode == _NO_BCC:
        hint = "apt-get install python3-bpfcc, and make the venv with --system-site-packages"
        raise Unsupported(reason, hint)
    names = ", ".join(path.name for path in (source, *beside))
    failure = Rejected(f"cannot load the programs of {names}: {reason}", "-v=4 shows the whole log")
    failure.add_note(log)
    raise failure


def _run(request: str, kept_open: tuple[int, ...]) -> "tuple[subprocess.Popen[str], str]":
    """The child, which has ended, and its log. It is born with the signals that end us blocked: a Ctrl-C
    goes to the whole process group, and it is for us to say what becomes of it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=kept_open,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return child, child.communicate(request)[1]


def expand(*sources: Path) -> str:
    """The sources as one, with our own headers put in place, each once: bcc rewrites the main file only.

    `#line` keeps the messages of clang and of the verifier true.
    """
    seen: set[Path] = set()
    return "\n".join(line for source in sources for line in _expanded(source, seen)) + "\n"


def _expanded(path: Path, seen: set[Path]) -> list[str]:
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        include = _LOCAL_INCLUDE.match(line)
        if include:
            header = path.parent / include[1]
            if header not in seen:
                seen.add(header)
                lines += _expanded(header, seen)
            lines.append(f'#line {number + 1} "{path.name}"')
        else:
            lines.append("" if line.strip() == "#pragma once" else line)
    return lines


_NO_BCC = 9


def _import_bcc() -> Any:
    try:
        import bcc
    except ImportError as failure:
        sys.stderr.write(f"bcc cannot be imported by {sys.executable}: {failure}\n")
        sys.exit(_NO_BCC)
    if not hasattr(bcc, "BPF"):
        where = getattr(bcc, "__file__", "?")
        sys.stderr.write(f"{where} is PyPI's bcc, an unrelated package: remove it\n")
        sys.exit(_NO_BCC)
    return bcc


def _end_with_parent() -> None:
    """prctl(2): a compiler whose agent was killed would be in the next one's way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _load(request: dict[str, Any]) -> None:
    sources = [Path(source) for source in request["sources"]]
    # bcc asks for kernel headers, which a node need not have; these stand-ins are all it uses.
    os.environ["BCC_KERNEL_SOURCE"] = str(sources[0].parent / "include")
    bcc = _import_bcc()
    cflags = [*_FLAGS, f"-I/usr/include/{sysconfig.get_config_var('MULTIARCH')}"]
    cflags += [f"-D{name}={value}" for name, value in request["defines"].items()]
    cflags += [f'-DPIN_DIR="{request["maps"]}"']
    loaded = bcc.BPF(text=expand(*sources), cflags=cflags)
    pins, partial = Path(request["pins"]), Path(request["pins"] + "_partial")
    partial.mkdir(parents=True, exist_ok=True)
    for path in partial.iterdir():  # of a child that was killed
        if path != Path(request["maps"]):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    from ebpfproxy.kernel.bpf import Program

    for name, type_, attach_type in request["programs"]:
        function = loaded.load_func(name.encode(), type_, attach_type=attach_type)
        Program(function.fd, name).pin(partial / name)
    partial.rename(pins)


if __name__ == "__main__":
    _end_with_parent()
    with contextlib.redirect_stdout(io.StringIO()):
        _load(json.load(sys.stdin))
