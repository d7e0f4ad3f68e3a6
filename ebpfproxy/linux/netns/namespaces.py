"""All network namespaces of the machine: finding them, and running code inside one.

The agent runs in the host's network namespace. sock_diag shows only sockets of the current namespace, so the
search for stale UDP sockets enters the namespace of each pod.
Sources: namespaces(7), setns(2), proc_pid_ns(5); ip-netns(8) for the mounts under /run/netns.
"""

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence

from ebpfproxy.errors import NotFound
from ebpfproxy.linux.netns import netns

Identity = tuple[int, int]
"""Device and inode number of a namespace. They identify it (namespaces(7))."""

RUN_NETNS = ("/run/netns", "/var/run/netns", "/run/docker/netns")
"""Folders in which ip-netns, container runtimes (CNI) and Docker bind-mount namespaces."""


def network_namespaces(proc_root: str = "/proc", run_netns: Sequence[str] = RUN_NETNS) -> list[str]:
    """One path for each network namespace of the machine: bind mounts first, then those of processes.

    A path in proc is valid only while its process exists; `opened_network_namespaces` avoids this race.
    In a container this requires hostPID (to see all processes) and CAP_SYS_PTRACE (for processes of other
    users). Processes that have ended or cannot be accessed are skipped. A namespace is not found if only
    a thread that is not its process's main thread, or only an open descriptor, refers to it.
    """
    found: dict[Identity, str] = {}
    for path, identity in _candidates(proc_root, run_netns):
        found.setdefault(identity, path)
    return list(found.values())


def opened_network_namespaces(
    proc_root: str = "/proc", run_netns: Sequence[str] = RUN_NETNS
) -> Generator[int, None, None]:
    """Yield one descriptor for each network namespace. It is closed when the next one is requested.

    If a process ends before its namespace is opened, another process of the same namespace is used.
    If you end the iteration early, close the generator (`contextlib.closing`).
    """
    yielded: set[Identity] = set()
    for path, identity in _candidates(proc_root, run_netns):
        if identity in yielded:
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            opened = identity_of_descriptor(descriptor)  # another process may have the process id by now
            if opened not in yielded:
                yielded.add(opened)
                yield descriptor
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def in_namespace(descriptor: int) -> Iterator[None]:
    """Run the block in the network namespace of `descriptor`, then return to the thread's own.

    setns(2) moves only the calling thread. Sockets keep the namespace in which they are created, and threads
    that are started in the block stay in the namespace. So use no shared thread pool in the block.

    Raises the errors of `netns.enter`: without CAP_SYS_ADMIN, or if `descriptor` is not a network namespace.
    """
    with open("/proc/thread-self/ns/net", "rb") as own:
        netns.enter(descriptor)
        try:
            yield
        finally:
            netns.enter(own.fileno())


def _candidates(proc_root: str, run_netns: Sequence[str]) -> Iterator[tuple[str, Identity]]:
    """Every path of a network namespace, with its identity. A namespace can have many paths."""
    device = _nsfs_device(proc_root)
    for folder in run_netns:
        for name in _entries(folder):
            path = f"{folder}/{name}"
            # A file without a mount is not a namespace.
            if (identity := identity_of(path)) and identity[0] == device:
                yield path, identity
    for name in _entries(proc_root):
        if name.isdigit():
            path = f"{proc_root}/{name}/ns/net"
            if identity := identity_of(path):
                yield path, identity


def _nsfs_device(proc_root: str) -> int:
    identity = identity_of(f"{proc_root}/self/ns/net")
    if identity is None:
        raise NotFound(f"cannot find namespaces in {proc_root}", "mount a proc file system there")
    return identity[0]


def _entries(folder: str) -> list[str]:
    """Names in a folder; empty if the folder cannot be read."""
    try:
        return os.listdir(folder)  # noqa: PTH208  (twice as fast as Path.iterdir)
    except OSError:
        return []


def identity_of(path: str) -> Identity | None:
    """The identity of the namespace at `path`; None if the file does not exist or may not be accessed."""
    try:
        return _identity(os.stat(path))  # noqa: PTH116  (takes half the time of Path.stat)
    except OSError:
        return None


def identity_of_descriptor(descriptor: int) -> Identity:
    """The identity of an open namespace."""
    return _identity(os.fstat(descriptor))


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino
