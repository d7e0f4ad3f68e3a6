"""Attaches programs to a cgroup v2: by links if the kernel has them, else by PROG_ATTACH.

It also creates temporary cgroups, to run a program for a single process.
"""

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ebpfproxy.errors import KernelError, NotFound, Rejected
from ebpfproxy.linux.bpf.bpf import PROG_ATTACH, PROG_DETACH, PROG_QUERY, Link, Program, bpf

_ALLOW_MULTI, _REPLACE = 2, 4  # BPF_F_ALLOW_MULTI, BPF_F_REPLACE
_QUERY_EFFECTIVE = 1  # BPF_F_QUERY_EFFECTIVE
_CONNECT = (  # "0" is the writing process; the hooks run before the kernel uses the socket
    "import socket, sys\n"
    "open(sys.argv[1], 'w').write('0')\n"
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect_ex(('127.0.0.1', 9))\n"
)
_TEMPORARY = "ebpfproxy-temporary-"
_MAX_PROGRAMS = 1024  # up to BPF_CGROUP_MAX_PROGS (64) of each cgroup on the path to the root


@contextmanager
def opened(cgroup: Path) -> Iterator[int]:
    """A file descriptor of the cgroup's directory. Raises NotFound."""
    try:
        fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as failure:
        raise NotFound(f"cannot open the cgroup {cgroup}: {failure.strerror}") from failure
    try:
        yield fd
    finally:
        os.close(fd)


def programs(cgroup: Path, attach_type: int, effective: bool = False) -> list[int]:
    """The ids of the programs attached to this cgroup. `effective`: also those of its ancestors, in the order
    in which they run."""
    ids = (ctypes.c_uint32 * _MAX_PROGRAMS)()
    with opened(cgroup) as fd:
        flags = _QUERY_EFFECTIVE if effective else 0
        attr = struct.pack("=IIIIQI4x", fd, attach_type, flags, 0, ctypes.addressof(ids), _MAX_PROGRAMS)
        _, result = bpf(PROG_QUERY, attr, f"cannot list the programs of {cgroup}")
    return list(ids[: struct.unpack_from("=I", result, 24)[0]])


def attach_link(program: Program, cgroup: Path, attach_type: int, pin: Path) -> None:
    """Attach by a link pinned at `pin`. If the link exists, its program is replaced in one step.

    A link whose cgroup is gone (calico #12801: ENOLINK), or is another one, is unpinned and created again.
    Raises Unsupported if the kernel has no cgroup links.
    """
    with opened(cgroup) as fd:
        if _replaced(program, os.fstat(fd).st_ino, pin):
            return
        fresh = pin.with_name(f"{pin.name}_new")
        fresh.unlink(missing_ok=True)
        link = Link.create(program, fd, attach_type)
        try:
            link.pin(fresh)
            fresh.rename(pin)  # a previous link stays in force until now
        finally:
            link.close()


def detach_link(pin: Path) -> None:
    """Detach the pinned link at once, and unpin it.

    Without the detachment, the kernel detaches a link some time after its last pin is removed. Kernels before
    5.9 always do.
    """
    with suppress(KernelError), closing(Link.pinned(pin)) as link:
        link.detach()
    pin.unlink(missing_ok=True)


def _replaced(program: Program, cgroup_id: int, pin: Path) -> bool:
    """Replace the program of the pinned link. False if it fails, or the link is not of that cgroup."""
    try:
        link = Link.pinned(pin)
    except KernelError:
        return False
    try:
        if link.cgroup_id != cgroup_id:
            return False
        link.replace(program)
    except KernelError:
        return False
    finally:
        link.close()
    return True


def attach_multi(program: Program, cgroup: Path, attach_type: int, previous: Program | None) -> None:
    """Attach without a link, beside other programs. It replaces `previous` if that is attached."""
    with opened(cgroup) as fd:
        if previous is not None and previous.id in programs(cgroup, attach_type):
            flags, old = _ALLOW_MULTI | _REPLACE, previous.fd
        else:
            flags, old = _ALLOW_MULTI, 0
        attr = struct.pack("=IIIII", fd, program.fd, attach_type, flags, old)
        bpf(PROG_ATTACH, attr, f"cannot attach {program.name} to {cgroup}")


def detach(program: Program, cgroup: Path, attach_type: int) -> bool:
    """Undo `attach_multi`. Returns whether the program was attached in that way."""
    with opened(cgroup) as fd:
        attr = struct.pack("=IIIII", fd, program.fd, attach_type, 0, 0)
        try:
            bpf(PROG_DETACH, attr, f"cannot detach {program.name} from {cgroup}")
        except NotFound:
            return False
    return True


@contextmanager
def temporary(parent: Path) -> Iterator[Path]:
    """A cgroup below `parent` that exists within the block, with what is attached to it. Raises Rejected."""
    try:
        created = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
    except OSError as failure:
        hint = "mount it writable" if parent.is_dir() else "set --cgroup-root to the root of cgroup v2"
        raise Rejected(f"cannot create a cgroup below {parent}: {failure.strerror}", hint) from failure
    try:
        yield created
    finally:
        created.rmdir()


def remove_temporary(parent: Path, dry_run: bool = False) -> list[str]:
    """Remove temporary cgroups that a killed process has left. Return their names.

    A cgroup that contains a process stays.
    """
    removed = []
    for path in sorted(parent.glob(f"{_TEMPORARY}*")):
        with suppress(OSError):
            if not dry_run:
                path.rmdir()
            removed.append(path.name)
    return removed


def connect_in(cgroup: Path) -> None:
    """Run a process that calls connect(2), in that cgroup and in the calling thread's network namespace.

    It connects a UDP socket to loopback, which sends no packet. Raises Rejected.
    """
    command = [sys.executable, "-I", "-S", "-c", _CONNECT, str(cgroup / "cgroup.procs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise Rejected(f"cannot run a process in cgroup {cgroup}: {reason}")
