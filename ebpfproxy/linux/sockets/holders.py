"""Finds the processes that hold sockets: the links of sockets in /proc/PID/fd are `socket:[INODE]`.

sock_diag(7) shows the inode of a socket, but not its processes. Only the folders of processes in proc show
them (proc_pid_fd(5)). Reading those of other users' processes requires CAP_SYS_PTRACE.
"""

import os
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ebpfproxy.linux.netns import namespaces

_SOCKET = "socket:["


class Holder(NamedTuple):
    """Descriptor `fd` of process `pid` is the socket with this inode."""

    pid: int
    fd: int
    inode: int


def holders(
    proc_root: str, wanted: Collection[int], near: Collection[namespaces.Identity]
) -> Iterator[list[Holder]]:
    """Walk over all processes once; yield, for each one, its descriptors of sockets with the inodes `wanted`.

    Processes in one of the network namespaces `near` come first. The caller may remove inodes from `wanted`;
    the walk ends when `wanted` is empty. Processes that hold none of them, have ended or may not be accessed
    are skipped.

    A socket is not found if only a message in flight (SCM_RIGHTS), an io_uring, or a thread with its own
    descriptor table holds it.
    """
    for pid in _processes(proc_root, near):
        if not wanted:
            return
        if held := _held(f"{proc_root}/{pid}/fd", pid, wanted):
            yield held


def _processes(proc_root: str, near: Collection[namespaces.Identity]) -> Iterator[int]:
    others: list[int] = []
    for name in _entries(proc_root):
        if name.isdigit():
            if namespaces.identity_of(f"{proc_root}/{name}/ns/net") in near:
                yield int(name)
            else:
                others.append(int(name))
    yield from others


def sockets_of(pid: int) -> list[int]:
    """Return the inodes of all sockets of a process; empty if it has ended or may not be accessed."""
    return [inode for _, inode in _sockets(f"/proc/{pid}/fd")]


def _held(folder: str, pid: int, wanted: Collection[int]) -> list[Holder]:
    return [Holder(pid, fd, inode) for fd, inode in _sockets(folder) if inode in wanted]


def _sockets(folder: str) -> Iterator[tuple[int, int]]:
    """Yield descriptors and inodes of sockets."""
    for name in _entries(folder):
        try:
            link = os.readlink(f"{folder}/{name}")  # noqa: PTH115  (takes a third of the time of Path.readlink)
        except OSError:
            continue  # closed meanwhile
        if link.startswith(_SOCKET):
            yield int(name), int(link[len(_SOCKET) : -1])


def _entries(folder: str) -> list[str]:
    """Names in a folder; empty if it is missing or may not be read."""
    try:
        return os.listdir(folder)  # noqa: PTH208  (twice as fast as Path.iterdir)
    except OSError:
        return []
