"""Reconnects stale UDP sockets of other processes.

connect() to the frontend runs the hook of the socket's own cgroup, which selects an endpoint. Without an
endpoint the socket waits for one. The process is not notified. linux/sockets/duplicates.py describes which
properties of the socket stay.

Sockets are found in three steps, each for all sockets together:
1. sock_diag in each network namespace returns the inode of each stale socket.
2. One walk over /proc/PID/fd finds the processes that hold these inodes.
3. pidfd_getfd(2) duplicates the descriptor. Its cookie and its peer are compared directly before connect().

Some microseconds are between that comparison and connect(). If the process connects the socket to another
address meanwhile, that connection is lost.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Mapping

from ebpfproxy.backends.ebpf.sockets.peers import SocketPeers, StalePeer
from ebpfproxy.errors import KernelError, NotFound, Unsupported
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.sockets import duplicates, holders
from ebpfproxy.linux.sockets.by_namespace import by_namespace
from ebpfproxy.linux.sockets.sockets import DiagSocket, State
from ebpfproxy.model.address import Protocol, is_loopback

NO_HOLDER = "cannot find a process with a descriptor of the socket"
_HINT = "run with hostPID and CAP_SYS_PTRACE; ignore this if processes were just passing the socket on"


@dataclasses.dataclass(slots=True)
class Outcome:
    """The outcome of one pass, by cookie. `absent`: sockets that are in no network namespace. They were
    closed just now, or earlier on kernels without the hook sock_release. `failed`: why they were not
    reconnected."""

    reconnected: set[int] = dataclasses.field(default_factory=set)
    absent: set[int] = dataclasses.field(default_factory=set)
    failed: dict[int, KernelError] = dataclasses.field(default_factory=dict)


def reconnect(proc_root: str, peers: SocketPeers, stale: Mapping[int, StalePeer]) -> Outcome:
    """Make one pass over `stale`. Raises KernelError if sockets cannot be listed."""
    located, near = _locate(proc_root, stale)
    outcome = Outcome()
    outcome.absent = stale.keys() - {found.cookie for found in located.values()}
    for held in holders.holders(proc_root, located.keys(), near):
        _reconnect_of(held, located, peers, outcome)
    for found in located.values():
        outcome.failed.setdefault(found.cookie, NotFound(NO_HOLDER, _HINT))
    return outcome


def located_by_namespace(
    proc_root: str, stale: Mapping[int, StalePeer]
) -> Generator[tuple[namespaces.Identity, list[DiagSocket]]]:
    """Yield the stale sockets of each network namespace. It ends when all are found.

    The calling thread is in that namespace until it requests the next one.
    """
    sought = frozenset(each.peer for each in stale.values())
    missing = set(stale)
    connected = by_namespace(proc_root, Protocol.UDP, [State.ESTABLISHED], sought)
    with contextlib.closing(connected) as spaces:
        while missing and (space := next(spaces, None)):
            identity, with_peer = space
            found = [each for each in with_peer if each.cookie in missing]
            missing.difference_update(each.cookie for each in found)
            yield identity, found


def _locate(
    proc_root: str, stale: Mapping[int, StalePeer]
) -> tuple[dict[int, DiagSocket], Collection[namespaces.Identity]]:
    """Stale sockets by inode, and their network namespaces."""
    located: dict[int, DiagSocket] = {}
    near: set[namespaces.Identity] = set()
    for identity, found in located_by_namespace(proc_root, stale):
        if found:
            near.add(identity)
            located.update((each.inode, each) for each in found)
    return located, near


def _reconnect_of(
    held: list[holders.Holder], located: dict[int, DiagSocket], peers: SocketPeers, outcome: Outcome
) -> None:
    """Reconnect the sockets of one process. Finished ones are removed from `located`; another process may
    hold the others."""
    try:
        process = duplicates.open_process(held[0].pid)
    except NotFound:
        return
    except KernelError as failure:
        outcome.failed.update((located[each.inode].cookie, failure) for each in held)
        return
    try:
        for _, descriptor, inode in held:
            found = located.get(inode)
            if found and _try(process, descriptor, found, peers, outcome):
                del located[inode]
    except Unsupported as failure:  # the same is true of each descriptor of this process
        outcome.failed.update((located[each.inode].cookie, failure) for each in held if each.inode in located)
    finally:
        duplicates.close(process)


def _try(process: int, descriptor: int, found: DiagSocket, peers: SocketPeers, outcome: Outcome) -> bool:
    """Reconnect a socket; return whether it is finished. Raises Unsupported if duplicating is not
    permitted."""
    try:
        with duplicates.duplicated(process, descriptor, found) as sock:
            stale = peers.of(found.cookie)
            if stale and duplicates.peer(sock) in (stale.frontend, stale.peer):
                if stale.waiting and is_loopback(
                    found.source
                ):  # a NodePort: its endpoints are not on loopback
                    duplicates.choose_source_again(sock)
                duplicates.connect(sock, *stale.frontend)
                outcome.reconnected.add(found.cookie)
    except Unsupported:
        raise
    except NotFound:
        return False  # closed in this process
    except KernelError as failure:
        outcome.failed[found.cookie] = failure
        return False
    outcome.failed.pop(found.cookie, None)
    return True
