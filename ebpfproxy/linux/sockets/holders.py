"""Which processes hold which sockets: /proc/PID/fd, where the link of a socket is `socket:[INODE]`.

sock_diag(7) shows the inode of a socket, but not its process. Only the directories of processes show
that (proc_pid_fd(5)). Reading them needs CAP_SYS_PTRACE for processes of other users.
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
    """By process, what it holds of the sockets with the inodes `wanted`. One walk over all processes.

    Processes in one of the network namespaces `near` come first. The caller removes from `wanted` what it
    needs no more, and the walk ends when `wanted` is empty. A process that holds none of them, has ended or
    must not be read is left out.

    Not found are sockets that are held only by a message in flight (SCM_RIGHTS), by an io_uring, or by a
    thread with a descriptor table of its own.
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


def _held(folder: str, pid: int, wanted: Collection[int]) -> list[Holder]:
    found: list[Holder] = []
    for name in _entries(folder):
        try:
            link = os.readlink(f"{folder}/{name}")  # noqa: PTH115  (a third of the time of Path.readlink)
        except OSError:
            continue  # closed meanwhile
        if link.startswith(_SOCKET) and (inode := int(link[len(_SOCKET) : -1])) in wanted:
            found.append(Holder(pid, int(name), inode))
    return found


def _entries(folder: str) -> list[str]:
    """Names in a folder; none where it is missing or must not be read."""
    try:
        return os.listdir(folder)  # noqa: PTH208  (twice as fast as Path.iterdir, and names are all we need)
    except OSError:
        return []
