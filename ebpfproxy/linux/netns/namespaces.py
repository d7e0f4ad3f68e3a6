"""Network namespaces of the machine: which there are, and doing something inside of one.

The agent stands in the host's network namespace, but the sockets of pods are in theirs, and sock_diag
shows only those of the namespace one is in. So stale UDP sockets are searched in each of them.
Sources: namespaces(7), setns(2), proc_pid_ns(5); ip-netns(8) for the mounts under /run/netns.
"""

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence

from ebpfproxy.errors import NotFound
from ebpfproxy.linux.netns import netns

Identity = tuple[int, int]
"""Device and inode number of a namespace: two are the same where both are (namespaces(7))."""

RUN_NETNS = ("/run/netns", "/var/run/netns", "/run/docker/netns")
"""Where ip-netns, container runtimes (CNI) and Docker bind-mount namespaces that no process need be in."""


def network_namespaces(proc_root: str = "/proc", run_netns: Sequence[str] = RUN_NETNS) -> list[str]:
    """One path for each network namespace of the machine: the bind mounts first, then processes'.

    A path of a process is valid only while that process lives; `opened_network_namespaces` has no such
    gap. Of a container it takes hostPID (all processes) and CAP_SYS_PTRACE (processes of other users);
    a process that is gone, is a zombie, or may not be looked into is skipped. A namespace that only a
    thread other than its process's first, or only an open descriptor, holds is not found.
    """
    found: dict[Identity, str] = {}
    for path, identity in _candidates(proc_root, run_netns):
        found.setdefault(identity, path)
    return list(found.values())


def opened_network_namespaces(
    proc_root: str = "/proc", run_netns: Sequence[str] = RUN_NETNS
) -> Generator[int, None, None]:
    """A descriptor of each network namespace once, valid until the next is asked for, then closed.

    Where a process vanishes before it could be opened, the next one of the same namespace stands in.
    Close the iterator (`contextlib.closing`) where it is left early.
    """
    given: set[Identity] = set()
    for path, identity in _candidates(proc_root, run_netns):
        if identity in given:
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            opened = identity_of_descriptor(descriptor)  # the process id may have changed hands since
            if opened not in given:
                given.add(opened)
                yield descriptor
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def in_namespace(descriptor: int) -> Iterator[None]:
    """Have the calling thread in the network namespace of `descriptor`, and back in its own afterwards.

    setns(2) moves one thread. Sockets keep the namespace in which they were made; threads started
    inside stay inside. So nothing but the task at hand may run in this thread meanwhile: no event
    loop, no thread pool that is shared.

    Raises what `netns.enter` raises: without CAP_SYS_ADMIN, or for a descriptor of something else.
    """
    with open("/proc/thread-self/ns/net", "rb") as own:
        netns.enter(descriptor)
        try:
            yield
        finally:
            netns.enter(own.fileno())


def _candidates(proc_root: str, run_netns: Sequence[str]) -> Iterator[tuple[str, Identity]]:
    """Every path of a network namespace with the namespace's identity, the same namespace many times."""
    device = _nsfs_device(proc_root)
    for folder in run_netns:
        for name in _entries(folder):
            path = f"{folder}/{name}"
            # A file on which nothing is mounted (any more) is no namespace.
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
        raise NotFound(f"{proc_root} shows no namespaces", "is it a proc file system?")
    return identity[0]


def _entries(folder: str) -> list[str]:
    """Names in a folder; none where the folder is missing."""
    try:
        return os.listdir(folder)  # noqa: PTH208  (twice as fast as Path.iterdir, and names are all we need)
    except OSError:
        return []


def identity_of(path: str) -> Identity | None:
    """None where there is no such file, or it must not be read."""
    try:
        return _identity(os.stat(path))  # noqa: PTH116  (half of the time of Path.stat)
    except OSError:
        return None


def identity_of_descriptor(descriptor: int) -> Identity:
    """Of the namespace that is open as `descriptor`."""
    return _identity(os.fstat(descriptor))


def _identity(status: os.stat_result) -> Identity:
    """namespaces(7): two are the same where both device and inode number are."""
    return status.st_dev, status.st_ino
