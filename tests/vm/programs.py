"""The costs of loading each BPF program on this kernel, as JSON: run in a VM, or anywhere as root.

    python -m tests.vm.programs programs.json

The programs are loaded for the features of this kernel, as in the agent. Each is loaded separately, so that
a rejected program does not prevent the others.
"""

import ctypes
import json
import re
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ebpf import features
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf.bpf import PROG_LOAD, Program, bpf
from ebpfproxy.linux.bpf.loader import ProgramSpec
from tests.support.program_code import SPECS, program_code

_STATISTICS = 4  # BPF_LOG_STATS: the verifier's statistics and its reason to reject, without each step (5.2)
_PROCESSED = re.compile(r"processed (\d+) insns")
_LAST_LINES = 6


class Cost(NamedTuple):
    """The costs of one program. `rejection` has the verifier's last lines, or is "" if the program was
    loaded."""

    name: str
    load_ms: float
    instructions: int
    """The instructions of the loaded program, after the verifier's rewrites."""
    verified: int
    """The instructions that the verifier processed on all paths (the limit is a million)."""
    rejection: str = ""


def costs() -> list[Cost]:
    """The costs of all programs. Programs of hooks that this kernel lacks are rejected."""
    with program_code(features.present()) as code:
        return [_cost(spec, code[spec.name]) for spec in SPECS]


def _cost(spec: ProgramSpec, code: bytes) -> Cost:
    log = ctypes.create_string_buffer(1 << 20)
    instructions = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(b"Dual BSD/GPL")
    attr = struct.pack(
        "=IIQQIIQII16sII",
        *(spec.type, len(code) // 8, ctypes.addressof(instructions), ctypes.addressof(license_)),
        *(_STATISTICS, len(log), ctypes.addressof(log), 0, 0, spec.name.encode()[:15], 0, spec.attach_type),
    )
    started = time.perf_counter()
    try:
        fd, _ = bpf(PROG_LOAD, attr, "cannot load")
    except KernelError as failure:
        last_lines = log.value.decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        return Cost(spec.name, 0, 0, 0, "\n".join((failure.message, *last_lines)))
    took = time.perf_counter() - started
    program = Program(fd, spec.name)
    found = _PROCESSED.search(log.value.decode())
    translated = struct.unpack_from("=I", program.facts(24), 20)[0]  # xlated_prog_len of struct bpf_prog_info
    program.close()
    return Cost(spec.name, round(took * 1000, 1), translated // 8, int(found[1]) if found else 0)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([cost._asdict() for cost in costs()], indent=1))
