"""Command prefixes that start a process with fewer permissions or features."""

import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_REPOSITORY = Path(__file__).resolve().parents[2]
_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
_UNCOVERED = """
mount --bind "$1" /mnt
mount -t tmpfs -o mode=755 tmpfs "$2"
mkdir -p "$1"
mount --move /mnt "$1"
cd "$1"
shift 2
exec "$@"
"""

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K: classic BPF
_NUMBER, _ARGUMENTS = 0, 16  # offsets in struct seccomp_data
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SECCOMP_RET_*

_START = """
import ctypes, os, struct, sys
code = bytes.fromhex({code!r})
memory = ctypes.create_string_buffer(code, len(code))
program = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(memory)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP
os.execvp(sys.argv[1], sys.argv[1:])
"""

_WITHOUT_TCX = """
import runpy, sys
from ebpfproxy.linux.bpf import tcx
tcx.is_supported = lambda: False
sys.argv = sys.argv[3:]
runpy.run_module("ebpfproxy", run_name="__main__", alter_sys=True)
"""


class Rejections(NamedTuple):
    """A system call, by number, that fails with this errno if it has these arguments (the lower 32 bits, by
    position)."""

    number: int
    errno: int
    arguments: Mapping[int, int] = {}


def without(*capabilities: str) -> list[str]:
    """Run without these capabilities, named as by setpriv(1)."""
    return ["setpriv", "--bounding-set", ",".join(f"-{name}" for name in capabilities)]


def as_nobody() -> list[str]:
    """Run as an unprivileged user and group. If the checkout is in a folder that only root may read, such as
    /root, the process sees only the checkout in that folder."""
    closed = [each for each in reversed(_REPOSITORY.parents) if not each.stat().st_mode & 0o001]
    if not closed:
        return _NOBODY
    return ["unshare", "--mount", "sh", "-ec", _UNCOVERED, "sh", str(_REPOSITORY), str(closed[0]), *_NOBODY]


def rejecting(*calls: Rejections) -> list[str]:
    """A seccomp filter rejects these calls for the process and its children; see seccomp(2)."""
    code = b"".join(map(_rejection, calls)) + _instruction(_RETURN, 0, _ALLOW)
    return [sys.executable, "-c", _START.format(code=code.hex())]


def without_tcx() -> list[str]:
    """For `python -m ebpfproxy`: simulate a kernel without tcx (before 6.6)."""
    return [sys.executable, "-c", _WITHOUT_TCX]


def unmounting(*commands: str) -> list[str]:
    """Run in a new mount namespace after these shell commands have changed its mounts."""
    return ["unshare", "--mount", "sh", "-ec", "; ".join((*commands, 'exec "$0" "$@"'))]


def _rejection(call: Rejections) -> bytes:
    tests = [(_NUMBER, call.number)]
    tests += [(_ARGUMENTS + 8 * position, value) for position, value in call.arguments.items()]
    code = b""
    for left, (place, value) in zip(range(len(tests), 0, -1), tests, strict=True):
        code += _instruction(_LOAD, 0, place) + _instruction(_EQUAL, 2 * left - 1, value)
    return code + _instruction(_RETURN, 0, _ERRNO | call.errno)


def _instruction(code: int, otherwise: int, value: int) -> bytes:
    """struct sock_filter; `otherwise`: the number of instructions to skip if the comparison fails."""
    return struct.pack("=HBBI", code, 0, otherwise, value)
