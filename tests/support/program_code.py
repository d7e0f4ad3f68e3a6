"""The BPF programs as clang makes them, before any kernel has seen them; and how loops in them are closed."""

import contextlib
import struct
from collections.abc import Collection, Iterator

from ebpfproxy.backends.ebpf import features
from ebpfproxy.backends.ebpf.hooks import CLASSIFIERS, SCHED_CLS, SOCKET_HOOKS, TAIL_CALLS
from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES
from ebpfproxy.backends.ebpf.programs import object_file
from ebpfproxy.linux.bpf.loader import ProgramSpec, loaded
from ebpfproxy.linux.bpf.object_file import Relocation, relocated

SPECS = (
    *(ProgramSpec(hook.name, hook.program_type, hook.attach_type) for hook in SOCKET_HOOKS),
    *(ProgramSpec(name, SCHED_CLS, 0) for name in (*CLASSIFIERS, *TAIL_CALLS)),
)
_LOAD_64, _EXIT, _CALL, _GOTO = 0x18, 0x95, 0x85, 0x05
_JUMP_CLASSES = (0x05, 0x06)


@contextlib.contextmanager
def program_code(present: Collection[str]) -> Iterator[dict[str, bytes]]:
    """The instructions of each program by name, with maps that exist as long as the context.

    `present`: the features that the kernel is assumed to have, as `features.present`. Needs root.
    """
    file = object_file()
    numbers = COMPILED_SIZES.numbers() | features.numbers(present)
    with loaded(file, (), {}) as (_, maps):
        relocation = Relocation({name: opened.fd for name, opened in maps.items()}, numbers)
        yield {program.name: relocated(program, relocation) for program in file.programs}


def loops_closed_by_falling(code: bytes) -> list[tuple[int, int]]:
    """From which instruction to which a loop is closed without a jump.

    As check_cfg() of the kernel's verifier walks, which rejects such a loop before 10e14e9652bf ("bpf: fix
    control-flow graph checking in privileged mode", Linux 6.8).

    >>> loops_closed_by_falling(bytes((0xB7, *bytes(7), 0x55, 0, 0xFE, 0xFF, *bytes(4), 0x95, *bytes(7))))
    []
    >>> jump_in = bytes((0x05, 0, 1, 0, *bytes(4)))
    >>> body, out = bytes((0xB7, *bytes(7))), bytes((0x95, *bytes(7)))
    >>> head = bytes((0x55, 0, 1, 0, *bytes(4)))
    >>> back = bytes((0x05, 0, 0xFD, 0xFF, *bytes(4)))
    >>> loops_closed_by_falling(jump_in + body + head + back + out)
    [(1, 2)]
    """
    open_, done = 1, 2
    seen = {0: open_}
    stack = [(0, iter(_next(code, 0)))]
    found = []
    while stack:
        at, ways = stack[-1]
        for to, by_jump in ways:
            if to not in seen:
                seen[to] = open_
                stack.append((to, iter(_next(code, to))))
                break
            if seen[to] == open_ and not by_jump:
                found.append((at, to))
        else:
            seen[at] = done
            stack.pop()
    return found


def _next(code: bytes, at: int) -> list[tuple[int, bool]]:
    """Where it may go on from an instruction (struct bpf_insn), and whether by a jump."""
    operation, _, offset, _ = struct.unpack_from("<BBhi", code, at * 8)
    if operation == _EXIT:
        return []
    if operation == _LOAD_64:
        return [(at + 2, False)]
    if operation == _GOTO:
        return [(at + 1 + offset, True)]
    if operation & 7 in _JUMP_CLASSES and operation != _CALL:
        return [(at + 1, True), (at + 1 + offset, True)]
    return [(at + 1, False)]
