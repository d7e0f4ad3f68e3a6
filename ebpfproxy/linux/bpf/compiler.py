"""Compiles C and loads programs with bcc, in a child process.

`build` runs this module as a program. Only the child imports bcc, so the memory of clang and LLVM (130 MB) is
free once it ends. These pins remain:

    <maps>/NAME            every map that the source declares, pinned by the source itself (PIN_DIR)
    <programs>/NAME        every program; all of them appear in one step
    <programs>/tail_calls  the map with the programs of tail calls. It is pinned, since the kernel empties
                           a map to which only programs refer (prog_array_map_clear())

If the kernel does not load a program, the child writes a report to its standard output: one JSON object (see
`_Rejection`). Otherwise it writes nothing there. Messages of clang and of Python go to its standard error.

bcc must be that of the distribution (python3-bpfcc). On PyPI that name belongs to another project.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.errors import ProgramRejected, Rejected, Unsupported

_FLAGS = ("-Wall", "-Werror=implicit-function-declaration", "-I/usr/include", "-g0")
"""-g0: bcc requests debug information, which takes a fifth of the compiler's time and is not used."""
_LOG_LINES = 5
_LOG_WIDTH = 200  # characters of a line
_STATISTICS = ("processed ", "verification time ", "stack depth ", "max_states_per_insn ")
_OF_BCC = ("bpf: ", "HINT: ")
_PR_SET_PDEATHSIG = 1
_CLANG_ERROR = ": error: "  # after the file, line and column
TAIL_CALLS = "tail_calls"
_U32 = struct.Struct("=I")
_LOCAL_INCLUDE = re.compile(r'#include "([^"/]+)"')


class ProgramSpec(NamedTuple):
    """A function of the source, with its BPF_PROG_TYPE_* and its attach type (bpf_attach_type)."""

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
    tail_calls: tuple[str, ...] = (),
) -> None:
    """Compile `source`, load `programs`, and pin them below `program_pins`, which must not exist yet.

    - `beside`: sources that are compiled as one text with `source`. So clang runs once, and maps without pins
      are shared.
    - `map_pins`: maps that are pinned or linked below it already are used, without a check of their shape. It
      may be inside NAME_partial, which becomes `program_pins` (NAME).
    - `tail_calls`: which of `programs` are put into the map `tail_calls`, in this order.
    - `kept_open`: file descriptors that the child inherits, so that a lock among them is held until it ends.

    The child ends with this process. SIGINT and SIGTERM are blocked in it, since this process handles them.

    Raises Unsupported if bcc is missing or another package. Raises ProgramRejected if the kernel does not
    load a program. Raises Rejected if clang fails or the kernel does not create a map.
    """
    pins = {"maps": str(map_pins), "pins": str(program_pins)}
    _build((source, *beside), defines, programs, pins, kept_open, tail_calls)


def try_to_load(sources: Sequence[Path], defines: Mapping[str, str], programs: Sequence[ProgramSpec]) -> None:
    """Compile `sources` and load `programs` without pinning. Programs and maps do not exist after it returns.

    Without the macro PIN_DIR, the sources must declare maps without pins. Raises the same errors as `build`.
    """
    _build(sources, defines, programs, {"maps": "", "pins": ""}, ())


def _build(
    sources: Sequence[Path],
    defines: Mapping[str, str],
    programs: Sequence[ProgramSpec],
    pins: Mapping[str, str],
    kept_open: tuple[int, ...],
    tail_calls: Sequence[str] = (),
) -> None:
    request = {
        "sources": list(map(str, sources)),
        "defines": dict(defines),
        "programs": [list(program) for program in programs],
        **pins,
        "tail_calls": list(tail_calls),
    }
    code, report, messages = _run(json.dumps(request), kept_open)
    if code:
        raise _failure(code, report, messages, sources)


def _failure(code: int, report: str, messages: str, sources: Sequence[Path]) -> Rejected | Unsupported:
    """The error for an exit code of the child, its report and its messages."""
    if code == _REJECTED:
        return _rejection(_Rejection(**json.loads(report)))
    lines = [line for line in messages.splitlines() if line.strip()]
    last = lines[-1] if lines else f"the compiler returned {code}"
    reason = next((line for line in lines if _CLANG_ERROR in line), last)
    if code == _NO_BCC:
        hint = "apt-get install python3-bpfcc, and create the venv with --system-site-packages"
        return Unsupported(reason, hint)
    names = ", ".join(path.name for path in sources)
    failure = Rejected(
        f"cannot load the programs of {names}: {reason}", "run with -v=4 to see the complete log"
    )
    failure.add_note(messages)
    return failure


def _rejection(found: "_Rejection") -> ProgramRejected:
    """The message includes the verifier's reason, so that one line of the log is sufficient."""
    lines = _verifier_reason(found.log)
    error = os.strerror(found.errno) if found.errno else found.message
    reason = f"{error}: {lines[-1]}" if lines else error
    message = f"cannot load BPF program {found.program}: {reason}"
    hint = _hint(found.errno, bool(lines))
    failure = ProgramRejected(message, hint, found.program, found.errno, lines)
    failure.add_note(found.log)
    return failure


def _verifier_reason(log: str) -> tuple[str, ...]:
    """The last lines before the statistics, with the reason last. At most 5 lines of at most 200 characters.

    The kernel writes the reason last, before a line of statistics: print_verification_stats() in
    kernel/bpf/verifier.c (Linux 6.12). bcc prints the log between lines of its own (libbpf.c of bcc 0.26).

    >>> start = "bpf: Failed to load program: Permission denied\\n0: (61) r0 = *(u32 *)(r1 +24)\\n"
    >>> end = "R0 invalid mem access 'scalar'\\nprocessed 2 insns (limit 1000000)\\n\\nHINT: see docs\\n"
    >>> _verifier_reason(start + end)
    ('0: (61) r0 = *(u32 *)(r1 +24)', "R0 invalid mem access 'scalar'")
    >>> _verifier_reason("")
    ()
    """
    lines = [line.strip() for line in log.splitlines()]
    ends = next((at for at, line in enumerate(lines) if line.startswith(_STATISTICS[0])), len(lines))
    reported = [line for line in lines[:ends] if line and not line.startswith((*_STATISTICS, *_OF_BCC))]
    return tuple(line[:_LOG_WIDTH] for line in reported[-_LOG_LINES:])


def _hint(number: int, by_verifier: bool) -> str:
    if by_verifier:
        return "use another --proxy-mode or another kernel; run with -v=4 to see the verifier's log"
    if number in (errno.EPERM, errno.EACCES):
        return "run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, and without a seccomp filter"
    return "use another --proxy-mode; run with -v=4 to see the log of the compiler"


def _run(request: str, kept_open: tuple[int, ...]) -> tuple[int, str, str]:
    """The exit code of the child, its standard output and its standard error.

    The child starts with SIGINT and SIGTERM blocked. A Ctrl-C reaches the complete process group, but only
    this process must handle it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=kept_open,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    report, messages = child.communicate(request)
    return child.returncode, report, messages


def expand(*sources: Path) -> str:
    """The sources as one text, with each header of the project in it once: bcc rewrites the main file only.

    `#line` directives keep the positions in messages of clang and of the verifier correct.
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


_NO_BCC, _REJECTED = 9, 10  # exit codes of the child


class _Rejection(NamedTuple):
    """The child's report of a program that the kernel did not load.

    `errno`: 0 if bcc did not call the kernel. `log`: the output of the verifier and of bcc.
    """

    program: str
    errno: int
    message: str
    log: str


class _NotLoadedError(Exception):
    def __init__(self, rejection: _Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


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


def _end_with_parent() -> None:
    """End with the parent (prctl(2)). Otherwise the compiler of a killed agent disturbs the next agent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _load(request: dict[str, Any]) -> None:
    """Raises _NotLoadedError if the kernel does not load a program."""
    sources = [Path(source) for source in request["sources"]]
    # bcc requires kernel headers, which a node need not have. These replacements are sufficient.
    os.environ["BCC_KERNEL_SOURCE"] = str(sources[0].parent / "include")
    bcc = _import_bcc()
    cflags = [*_FLAGS, f"-I/usr/include/{sysconfig.get_config_var('MULTIARCH')}"]
    cflags += [f"-D{name}={value}" for name, value in request["defines"].items()]
    if request["maps"]:
        cflags += [f'-DPIN_DIR="{request["maps"]}"']
    compiled = bcc.BPF(text=expand(*sources), cflags=cflags)
    specs = [ProgramSpec(*program) for program in request["programs"]]
    if request["pins"]:
        partial = _emptied(Path(f"{request['pins']}_partial"), Path(request["maps"]))
        _pin_all(compiled, specs, request["tail_calls"], partial)
        partial.rename(request["pins"])
    else:
        for spec in specs:
            _load_one(compiled, spec)


def _emptied(partial: Path, maps: Path) -> Path:
    """The folder, emptied of what a killed child has left, except `maps`."""
    partial.mkdir(parents=True, exist_ok=True)
    for path in partial.iterdir():
        if path != maps:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return partial


def _pin_all(compiled: Any, specs: Sequence[ProgramSpec], tail_calls: Sequence[str], folder: Path) -> None:
    """Load each program, and pin it in `folder`."""
    from ebpfproxy.linux.bpf.bpf import Map, Program

    loaded = {spec.name: _load_one(compiled, spec) for spec in specs}
    for name, fd in loaded.items():
        Program(fd, name).pin(folder / name)
    if tail_calls:
        called = Map(compiled[TAIL_CALLS.encode()].map_fd, TAIL_CALLS)
        for index, name in enumerate(tail_calls):
            called.update(_U32.pack(index), _U32.pack(loaded[name]))
        called.pin(folder / TAIL_CALLS)


def _load_one(compiled: Any, spec: ProgramSpec) -> int:
    """The file descriptor of the loaded program, which bcc keeps. Raises _NotLoadedError."""
    with _standard_error() as log:
        ctypes.set_errno(0)
        try:
            return int(compiled.load_func(spec.name.encode(), spec.type, attach_type=spec.attach_type).fd)
        except Exception as failure:  # bcc has no more specific type for it
            number = ctypes.get_errno()  # of bcc's last system call, which tried to load it
            log.seek(0)
            text = log.read().decode(errors="replace")
            raise _NotLoadedError(_Rejection(spec.name, number, str(failure), text)) from failure


@contextlib.contextmanager
def _standard_error() -> Iterator[Any]:
    """A file with all output to standard error within the block, including that of the C library.

    bcc prints the verifier's log there, and cannot return it.
    """
    previous = os.dup(2)
    try:
        with os.fdopen(os.memfd_create("verifier-log"), "w+b") as log:
            os.dup2(log.fileno(), 2)
            try:
                yield log
            finally:
                os.dup2(previous, 2)
    finally:
        os.close(previous)


def _main() -> int:
    _end_with_parent()
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only this process writes to the report
    try:
        _load(json.load(sys.stdin))
    except _NotLoadedError as failure:
        with report:
            json.dump(failure.rejection._asdict(), report)
        return _REJECTED
    return 0


if __name__ == "__main__":
    sys.exit(_main())
