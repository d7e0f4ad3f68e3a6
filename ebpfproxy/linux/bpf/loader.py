"""Loads the programs of an object file into the kernel, and pins them.

These pins remain:

    <programs>/NAME        every program; all of them appear in one step
    <programs>/tail_calls  the map with the programs of tail calls. It is pinned, since the kernel empties
                           a map to which only programs refer (prog_array_map_clear())
    <programs>/scratches   the working memory of programs, which they pass on by tail calls. It is pinned for
                           programs that are loaded later
"""

import concurrent.futures
import contextlib
import ctypes
import errno
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.errors import KernelError, ProgramRejected
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.bpf.bpf import Map, Program
from ebpfproxy.linux.bpf.object_file import MapDeclaration, ObjectFile, Relocation, relocated

TAIL_CALLS = "tail_calls"
SHARED_MAPS = TAIL_CALLS, "scratches"
"""Maps that the programs of one folder share with each other only. They are pinned beside the programs."""
_U32 = struct.Struct("=I")
_LOG_STEPS, _LOG_STATISTICS = 1, 4  # BPF_LOG_LEVEL1, BPF_LOG_STATS (5.2, 06ee7115b0d1)
_LOG_LINES, _LOG_WIDTH = 5, 200  # of the reason; characters of a line
_STATISTICS = ("processed ", "verification time ", "stack depth ", "max_states_per_insn ")
_EXPLANATION = "Verification failed: "  # since 7.3 for some reasons: a page of source, history and suggestion
_LOG_SIZE = (1 << 24) - 1  # bytes: the most that every kernel accepts (bpf_check())


class ProgramSpec(NamedTuple):
    """A function of the source, with its BPF_PROG_TYPE_*, attach type (bpf_attach_type) and BPF_F_*."""

    name: str
    type: int
    attach_type: int
    flags: int = 0


def load_and_pin(
    file: ObjectFile,
    programs: Sequence[ProgramSpec],
    numbers: Mapping[int, int],
    map_pins: Path,
    program_pins: Path,
    tail_calls: Sequence[str] = (),
) -> None:
    """Load `programs`, and pin them below `program_pins`, which must not exist yet.

    - `numbers`: see `Relocation`.
    - `map_pins`: maps that are pinned or linked below it are used, without a check of their shape. All others
      exist as long as programs use them. It may be inside NAME_partial, which becomes `program_pins` (NAME).
    - `tail_calls`: which of `programs` are put into the map `tail_calls`, in this order. Only with these are
      SHARED_MAPS pinned.

    Raises ProgramRejected if the kernel does not load a program, KernelError if it does not make a map.
    """
    partial = _emptied(program_pins.with_name(f"{program_pins.name}_partial"), map_pins)
    with loaded(file, programs, numbers, map_pins) as (found, maps):
        for name, program in found.items():
            program.pin(partial / name)
        if tail_calls:
            called = maps[TAIL_CALLS]
            for index, name in enumerate(tail_calls):
                called.update(_U32.pack(index), _U32.pack(found[name].fd))
            for name in SHARED_MAPS:
                maps[name].pin(partial / name)
    partial.rename(program_pins)


def load_further(
    file: ObjectFile,
    program: ProgramSpec,
    numbers: Mapping[int, int],
    map_pins: Path,
    program_pins: Path,
) -> None:
    """Load one more program with the maps of `load_and_pin`, and pin it below `program_pins`.

    Raises as `load_and_pin`.
    """
    with loaded(file, (program,), numbers, map_pins, program_pins) as (found, _):
        found[program.name].pin(program_pins / program.name)


def _emptied(partial: Path, maps: Path) -> Path:
    """The folder, emptied of what a killed process has left, except `maps`."""
    partial.mkdir(parents=True, exist_ok=True)
    for path in partial.iterdir():
        if path != maps:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return partial


@contextlib.contextmanager
def loaded(
    file: ObjectFile,
    programs: Sequence[ProgramSpec],
    numbers: Mapping[int, int],
    map_pins: Path | None = None,
    shared: Path | None = None,
) -> Iterator[tuple[dict[str, Program], dict[str, Map]]]:
    """The programs and maps by name, which are closed after the block. Raises as `load_and_pin`.

    `shared`: where SHARED_MAPS are pinned, None to make new ones.

    Several programs are loaded at a time: the verifier has no common lock for privileged programs
    (bpf_check(), 45a73c17bfb9, 5.2).
    """
    with contextlib.ExitStack() as stack:
        maps: dict[str, Map] = {}
        for declared in sorted(file.maps, key=lambda each: bool(each.inner)):
            if shared and declared.name in SHARED_MAPS:
                maps[declared.name] = Map.pinned(shared / declared.name)
            else:
                maps[declared.name] = _opened(declared, map_pins, maps)
            stack.callback(maps[declared.name].close)
        relocation = Relocation({name: opened.fd for name, opened in maps.items()}, numbers)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1))
        waiting = {spec.name: pool.submit(_load, file, spec, relocation) for spec in programs}
        found: dict[str, Program] = {}
        failures = []
        for name, future in waiting.items():
            try:
                found[name] = future.result()
                stack.callback(found[name].close)
            except KernelError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
        yield found, maps


def _opened(declared: MapDeclaration, pins: Path | None, others: Mapping[str, Map]) -> Map:
    """The pinned map, or a new one. `others`: the templates of arrays of maps."""
    if pins is not None and (pins / declared.name).exists():
        return Map.pinned(pins / declared.name)
    sizes = declared.key_size, declared.value_size, declared.entries, declared.flags
    inner = others[declared.inner] if declared.inner else None
    return Map.create(declared.type, *sizes, declared.name, inner)


def _load(file: ObjectFile, spec: ProgramSpec, relocation: Relocation) -> Program:
    program = file.program(spec.name)
    if program is None:
        raise _rejection(spec.name, 0, "the source has no such function", "")
    code = relocated(program, relocation)
    try:
        return Program.load(spec.type, spec.attach_type, code, spec.name, file.license, flags=spec.flags)
    except KernelError as failure:
        number = bpf.errno_of(failure)
        raise _rejection(spec.name, number, failure.message, _log_of(file, spec, code)) from failure


def _log_of(file: ObjectFile, spec: ProgramSpec, code: bytes) -> str:
    """The verifier's log, by loading the program again: with a log, the verifier takes much longer."""
    log = ctypes.create_string_buffer(_LOG_SIZE)
    text = ""
    for level in (_LOG_STEPS, _LOG_STATISTICS):
        with contextlib.suppress(KernelError):
            Program.load(
                spec.type, spec.attach_type, code, spec.name, file.license, log, level, spec.flags
            ).close()
        text = log.value.decode(errors="replace")
        if _is_complete(text):
            break  # before 6.4 (1216640938035) a log that does not fit lacks its end, which has the reason
    return text


def _is_complete(log: str) -> bool:
    """Whether the log has its end, the statistics. A program without capabilities has no log at all.

    >>> _is_complete("0: R1=ctx\\n1: (61) r0 = *(u32")
    False
    """
    return not log or any(line.startswith(_STATISTICS[0]) for line in log.splitlines()[-5:])


def _verifier_reason(log: str) -> tuple[str, ...]:
    """The last lines before the explanation or the statistics, with the reason last. At most 5 lines of at
    most 200 characters.

    The kernel writes the reason last, before a line of statistics: print_verification_stats() in
    kernel/bpf/verifier.c (Linux 6.12). Some kernels write an explanation between them: bpf_diag_header() in
    kernel/bpf/diagnostics.c (Linux 7.3).

    >>> _verifier_reason("0: (61) r0 = *(u32 *)(r1 +24)\\nR0 invalid mem access 'scalar'\\nprocessed 2\\n")
    ('0: (61) r0 = *(u32 *)(r1 +24)', "R0 invalid mem access 'scalar'")
    >>> _verifier_reason("1: (95) exit\\nR0 !read_ok\\n\\nVerification failed: Memory Safety\\n  Y\\n")
    ('1: (95) exit', 'R0 !read_ok')
    >>> _verifier_reason("")
    ()
    """
    lines = [line.strip() for line in log.splitlines()]
    after = (_STATISTICS[0], _EXPLANATION)
    ends = next((at for at, line in enumerate(lines) if line.startswith(after)), len(lines))
    reported = [line for line in lines[:ends] if line and not line.startswith(_STATISTICS)]
    return tuple(line[:_LOG_WIDTH] for line in reported[-_LOG_LINES:])


def _rejection(program: str, number: int, message: str, log: str) -> ProgramRejected:
    """The message includes the verifier's reason, so that one line of the log is sufficient."""
    lines = _verifier_reason(log)
    text = os.strerror(number) if number else message
    reason = f"{text}: {lines[-1]}" if lines else text
    hint = _hint(number, bool(lines))
    failure = ProgramRejected(f"cannot load BPF program {program}: {reason}", hint, program, number, lines)
    failure.add_note(log)
    return failure


def _hint(number: int, by_verifier: bool) -> str:
    if by_verifier:
        return "use another --proxy-mode or another kernel; run with -v=4 to see the verifier's log"
    if number in (errno.EPERM, errno.EACCES):
        return "run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON, and without a seccomp filter"
    return "use another --proxy-mode"
