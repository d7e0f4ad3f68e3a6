"""linux/bpf/grace_period.py with a program that runs for a long time."""

import struct
import threading

import pytest

from ebpfproxy.linux.bpf.bpf import Map, Program
from ebpfproxy.linux.bpf.grace_period import GracePeriod
from ebpfproxy.linux.bpf.test_run import TestRuns
from tests.support.bpf_place import ARRAY, MMAPABLE

pytestmark = pytest.mark.kernel

SCHED_CLS = 3
LOOKUP, UPDATE = 1, 2  # helpers
SIZE, COPIES = 1 << 20, 2000
"""The program copies so many values of so many bytes. That takes some 100 ms."""
STARTED, ENDED = 0, 4
"""Offsets of the flags that the program sets."""


def instruction(code: int, to: int = 0, source: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
    """struct bpf_insn."""
    return struct.pack("=BBhi", code, source << 4 | to, offset, immediate)


def set_register(register: int, value: int) -> bytes:
    return instruction(0xB7, register, 0, 0, value)


def copy_register(register: int, source: int) -> bytes:
    return instruction(0xBF, register, source)


def call_with_map(helper: int, fd: int) -> bytes:
    """Call a helper for the key at the top of the stack."""
    load = instruction(0x18, 1, 1, 0, fd) + instruction(0)
    return load + copy_register(2, 10) + instruction(0x07, 2, 0, 0, -4) + instruction(0x85, 0, 0, 0, helper)


def slow_program(flags: Map, values: Map) -> Program:
    """Sets STARTED, copies values for a long time, then sets ENDED."""
    copy = copy_register(3, 7) + set_register(4, 0)
    load, rest = call_with_map(UPDATE, values.fd)[:16], call_with_map(UPDATE, values.fd)[16:]
    loop = load + rest[:16] + copy + rest[16:] + instruction(0x07, 8, 0, 0, 1)
    body = instruction(0x62, 6, 0, STARTED, 1) + instruction(0x62, 10, 0, -4, 1) + set_register(8, 0) + loop
    body += instruction(0xA5, 8, 0, -(len(loop) // 8) - 1, COPIES)  # if r8 < COPIES
    body += instruction(0x62, 6, 0, ENDED, 1)
    inner = call_with_map(LOOKUP, values.fd)
    inner += instruction(0x15, 0, 0, len(body) // 8 + 1, 0) + copy_register(7, 0) + body
    code = instruction(0x62, 10, 0, -4, 0) + call_with_map(LOOKUP, flags.fd)
    code += instruction(0x15, 0, 0, len(inner) // 8 + 1, 0) + copy_register(6, 0) + inner
    return Program.load(SCHED_CLS, 0, code + set_register(0, 0) + instruction(0x95))


def test_a_running_program_has_ended_after_the_wait() -> None:
    flags, values = Map.create(ARRAY, 4, 8, 1, MMAPABLE), Map.create(ARRAY, 4, SIZE, 2)
    program, period, seen = slow_program(flags, values), GracePeriod(), flags.mapped()
    runs = TestRuns(program)
    try:
        for _ in range(20):
            seen[:8] = bytes(8)
            thread = threading.Thread(target=runs.run, args=(bytes(64),))
            thread.start()
            while not seen[STARTED]:
                pass
            was_running = not seen[ENDED]
            period.wait()
            has_ended = bool(seen[ENDED])
            thread.join()
            assert has_ended
            if was_running:
                return
        pytest.fail("the program always ended before this thread could look")
    finally:
        seen.close()
        for each in program, period, values, flags:
            each.close()
