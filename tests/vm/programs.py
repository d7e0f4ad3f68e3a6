"""What each BPF program costs this kernel to load, as JSON: run in a VM, or anywhere as root.

    python -m tests.vm.programs > programs.json

The programs are compiled as the agent compiles them, with what this kernel is found to have; then each is
given to the kernel alone, so that one which is refused leaves the others to be tried.
"""

import ctypes
import json
import os
import re
import struct
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.dataplanes.ebpf import abi, features
from ebpfproxy.dataplanes.ebpf.hooks import CLASSIFIERS, SCHED_CLS, SOCKET_HOOKS
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.errors import KernelError
from ebpfproxy.kernel.bpf import PROG_LOAD, Program, bpf
from ebpfproxy.kernel.compiler import ProgramSpec, expand
from tests.support.bpf_place import bpf_place

_STATISTICS = 4  # BPF_LOG_STATS: what the verifier did, and its reason to refuse; not each step (5.2)
_PROCESSED = re.compile(r"processed (\d+) insns")
_SIZES = MapSizes(64, 64, 64, 64, 64, 64, 64)


class Cost(NamedTuple):
    """Of one program; `refusal` is "" for one that was loaded, otherwise the verifier's last lines."""

    name: str
    load_ms: float
    instructions: int
    """That it has when loaded, as the verifier rewrote it."""
    verified: int
    """How many the verifier went through, on all ways (the kernel refuses at a million)."""
    refusal: str = ""


def costs() -> list[Cost]:
    """Of all programs, those of hooks too that this kernel has not: its refusal says so."""
    specs = [ProgramSpec(hook.name, hook.program_type, hook.attach_type) for hook in SOCKET_HOOKS]
    specs += [ProgramSpec(name, SCHED_CLS, 0) for name in CLASSIFIERS]
    with bpf_place() as place:
        maps = place.bpffs / "maps"
        maps.mkdir()
        compiled = _compiled(maps)
        return [_cost(spec, compiled.dump_func(spec.name.encode())) for spec in specs]


def _compiled(maps: Path) -> Any:
    """bcc's object, whose maps are open, so that code which names them can be loaded. See compiler._load."""
    import bcc

    sources = [abi.source_directory() / name for name in ("connect.c", "tc.c")]
    os.environ["BCC_KERNEL_SOURCE"] = str(sources[0].parent / "include")
    defines = _SIZES.defines() | features.defines() | {"PIN_DIR": f'"{maps}"'}
    flags = ["-g0", "-I/usr/include", f"-I/usr/include/{sysconfig.get_config_var('MULTIARCH')}"]
    return bcc.BPF(text=expand(*sources), cflags=flags + [f"-D{key}={text}" for key, text in defines.items()])


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
        said = log.value.decode(errors="replace").strip().splitlines()[-6:]
        return Cost(spec.name, 0, 0, 0, "\n".join((failure.message, *said)))
    took = time.perf_counter() - started
    program = Program(fd, spec.name)
    found = _PROCESSED.search(log.value.decode())
    translated = struct.unpack_from("=I", program.facts(24), 20)[0]  # xlated_prog_len of struct bpf_prog_info
    program.close()
    return Cost(spec.name, round(took * 1000, 1), translated // 8, int(found[1]) if found else 0)


if __name__ == "__main__":
    json.dump([cost._asdict() for cost in costs()], sys.stdout, indent=1)
