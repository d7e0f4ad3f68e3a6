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


def _read(folder: Path) -> Process | None:
    try:
        name = (folder / "comm").read_text(errors="replace").rstrip("\n")
        line = (folder / "cmdline").read_text(errors="replace")
    except OSError:
        return None
    return Process(int(folder.name), name, tuple(line.split("\0")[:-1]))
