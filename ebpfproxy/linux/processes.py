"""Processes of this machine, as proc shows them."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.linux.netns import namespaces

_OWN_NETNS = "/proc/thread-self/ns/net"


class Process(NamedTuple):
    """`name`: up to 15 characters of the executable's name, or another one that it gave itself. `arguments`:
    its command line; empty for threads of the kernel."""

    pid: int
    name: str
    arguments: tuple[str, ...]


def in_own_netns(proc_root: Path = Path("/proc")) -> Iterator[Process]:
    """The processes in the network namespace of the calling thread, by process ID.

    `proc_root`: the host's proc in a container. Leaves out processes whose namespace may not be read, and
    those that end meanwhile.
    """
    own = namespaces.identity_of(_OWN_NETNS)
    for folder in sorted(proc_root.glob("[0-9]*"), key=lambda each: int(each.name)):
        if own and namespaces.identity_of(f"{folder}/ns/net") == own and (found := _read(folder)):
            yield found


def children(pid: int) -> list[Process]:
    """Return the processes that a process has started, by process ID, without those that end meanwhile.

    Empty also if the process has ended. Reads the parent of each process, because the kernel's list of
    children leaves some out while others end (proc_pid_task_children(5)).
    """
    folders = sorted(Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name))
    return [child for each in folders if parent(each) == pid and (child := _read(each))]


def parent(folder: Path) -> int | None:
    """Field ppid of proc_pid_stat(5). `folder`: that of the process in proc. None if it has ended."""
    try:
        return int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return None


def _read(folder: Path) -> Process | None:
    try:
        name = (folder / "comm").read_text(errors="replace").rstrip("\n")
        line = (folder / "cmdline").read_text(errors="replace")
    except OSError:
        return None
    return Process(int(folder.name), name, tuple(line.split("\0")[:-1]))
