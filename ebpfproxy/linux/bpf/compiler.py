"""Compiles C with bcc, in a child process.

`compile_sources` runs this module as a program. Only the child imports bcc, so the memory of clang and LLVM
(130 MB) is free once it ends. The child writes the object file to its standard output. Messages of clang and
of Python go to its standard error.

bcc must be that of the distribution (python3-bpfcc). On PyPI that name belongs to another project.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ebpfproxy.errors import Rejected, Unsupported
from ebpfproxy.linux.bpf import object_cache, object_file
from ebpfproxy.linux.bpf.object_file import MapDeclaration, ObjectFile
from ebpfproxy.linux.child import python

_FLAGS = ("-Wall", "-Werror=implicit-function-declaration", "-I/usr/include", "-g0")
"""-g0: bcc requests debug information, which takes a fifth of the compiler's time and is not used."""
_LICENSE = "Dual BSD/GPL"  # of every file in bpf/; the kernel allows some helpers only to such programs
_PR_SET_PDEATHSIG = 1
_CLANG_ERROR = ": error: "  # after the file, line and column
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LOCAL_INCLUDE = re.compile(r'#include "([^"/]+)"')
_ARRAY_OF_MAPS = re.compile(r'"(?:array|hash)_of_maps\$(\w+)"\s*,[^,]*,[^,]*,\s*(\w+)')
_NO_BCC, _NO_PARENT = 9, 1  # exit codes of the child

NO_BCC_HINT = (
    "use the image variant with bcc, or apt-get install python3-bpfcc and create the venv with "
    "--system-site-packages"
)
"""The remedy if there is neither an object file nor bcc."""


def compiled(sources: Sequence[Path], defines: Mapping[str, str]) -> tuple[ObjectFile, bool]:
    """The object file of `sources`, compiled as one text, and whether the compiler had to run.

    `defines`: macros with their values. Without a compiler run there is no need for bcc: see `object_cache`.

    Raises Unsupported if bcc is missing or another package, Rejected if clang fails or the kernel does not
    make a map.
    """
    digest = object_file.digest(code(sources), defines)
    return object_cache.cached(digest, lambda: compile_sources(sources, defines))


def is_compiled(sources: Sequence[Path], defines: Mapping[str, str]) -> bool:
    """Whether `compiled` finds a valid object file."""
    return object_cache.find(object_file.digest(code(sources), defines)) is not None


def code(sources: Sequence[Path]) -> str:
    """The text of `sources` without comments and with single blanks. Two equal texts compile alike."""
    return _without_comments(expand(*sources))


def _without_comments(text: str) -> str:
    return " ".join(_COMMENT.sub("", text).split())


def compile_sources(sources: Sequence[Path], defines: Mapping[str, str]) -> ObjectFile:
    """Compile in a child process. Raises as `compiled`.

    The child ends with this process. SIGINT and SIGTERM are blocked in it, since this process handles them.
    """
    request = {"sources": list(map(str, sources)), "defines": dict(defines)}
    ended, output, messages = _run(json.dumps(request))
    if ended:
        raise _failure(ended, messages, sources)
    return object_file.decode(output)


def _failure(ended: int, messages: str, sources: Sequence[Path]) -> Rejected | Unsupported:
    """The error for an exit code of the child and its messages."""
    lines = [line for line in messages.splitlines() if line.strip()]
    last = lines[-1] if lines else f"the compiler returned {ended}"
    reason = next((line for line in lines if _CLANG_ERROR in line), last)
    if ended == _NO_BCC:
        return Unsupported(f"no object file for these BPF programs, and {reason}", NO_BCC_HINT)
    names = ", ".join(path.name for path in sources)
    failure = Rejected(f"cannot compile {names}: {reason}", "run with -v=4 to see the complete log")
    failure.add_note(messages)
    return failure


def _run(request: str) -> tuple[int, bytes, str]:
    """The exit code of the child, its standard output and its standard error.

    The child starts with SIGINT and SIGTERM blocked. A Ctrl-C reaches the complete process group, but only
    this process must handle it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        child = subprocess.Popen(
            python("-m", __name__, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    output, messages = child.communicate(request.encode())
    return child.returncode, output, messages.decode(errors="replace")


def expand(*sources: Path) -> str:
    """The sources as one text, with each header of the project in it once: bcc rewrites the main file only.

    `#line` directives keep the positions in messages of clang correct.
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


def _import_bcc() -> Any:
    try:
        import bcc
    except ImportError as failure:
        sys.stderr.write(f"{sys.executable} cannot import bcc: {failure}\n")
        sys.exit(_NO_BCC)
    if not hasattr(bcc, "BPF"):
        path = getattr(bcc, "__file__", "?")
        sys.stderr.write(f"{path} is PyPI's bcc, an unrelated package: remove it\n")
        sys.exit(_NO_BCC)
    return bcc


def _end_with_parent(parent: int) -> None:
    """End with the parent (prctl(2)), also if it has ended before this call. `parent`: its process ID."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(_NO_PARENT)


def _compile(request: dict[str, Any]) -> ObjectFile:
    """In the child: bcc makes the maps, too, which end with the child."""
    sources = [Path(source) for source in request["sources"]]
    # bcc requires kernel headers, which a node need not have. These replacements are sufficient.
    os.environ["BCC_KERNEL_SOURCE"] = str(sources[0].parent / "include")
    bcc = _import_bcc()
    cflags = [*_FLAGS, f"-I/usr/include/{sysconfig.get_config_var('MULTIARCH')}"]
    cflags += [f"-D{name}={value}" for name, value in request["defines"].items()]
    text = expand(*sources)
    module = bcc.BPF(text=text, cflags=cflags)
    templates = {array: inner for inner, array in _ARRAY_OF_MAPS.findall(_COMMENT.sub("", text))}
    maps = dict(_maps(bcc.lib, module.module, templates))
    names = {fd: declared.name for fd, declared in maps.items()}
    count = bcc.lib.bpf_num_functions(module.module)
    functions = [bcc.lib.bpf_function_name(module.module, index) for index in range(count)]
    return ObjectFile(
        object_file.digest(_without_comments(text), request["defines"]),
        _LICENSE,
        tuple(maps.values()),
        tuple(
            object_file.without_file_descriptors(name.decode(), module.dump_func(name), names)
            for name in functions
        ),
    )


def _maps(lib: Any, module: int, templates: Mapping[str, str]) -> Iterator[tuple[int, MapDeclaration]]:
    """By file descriptor. `templates`: what the entries of an array of maps are like, by its name."""
    from ebpfproxy.linux.bpf.bpf import Map

    lib.bpf_table_name.argtypes = [ctypes.c_void_p, ctypes.c_size_t]  # bcc does not declare it
    lib.bpf_table_name.restype = ctypes.c_char_p
    for index in range(lib.bpf_num_tables(module)):
        name = lib.bpf_table_name(module, index).decode()
        fd = lib.bpf_table_fd_id(module, index)
        shape = Map(fd, name).shape
        sizes = shape.key_size, shape.value_size, shape.max_entries, shape.flags
        yield fd, MapDeclaration(name, shape.type, *sizes, templates.get(name, ""))


def _main() -> int:
    _end_with_parent(int(sys.argv[1]))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # only this process writes to its standard output, and only the object file
    with output:
        output.write(object_file.encode(_compile(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
