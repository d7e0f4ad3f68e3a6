"""Connects stale UDP sockets again, in the name of the processes that hold them.

connect() to the frontend runs the socket's own connect() hook, which selects an endpoint, or has the socket
wait where there is none. The process is not notified; see linux/sockets/duplicates.py for what stays.

A socket is found in three steps, each for all sockets at a time:
1. sock_diag in each network namespace: the inode of each stale socket;
2. one walk over /proc/PID/fd: the processes that hold these inodes;
3. pidfd_getfd(2): a duplicate of the descriptor. Its cookie and its peer are compared at the last moment.

Between that comparison and connect() are some microseconds. A process that connects the same socket to
another address within them loses that address.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Mapping

from ebpfproxy.backends.ebpf.sockets.peers import SocketPeers, StalePeer
from ebpfproxy.errors import KernelError, NotFound, Unsupported
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.sockets import duplicates, holders, sockets
from ebpfproxy.linux.sockets.sockets import DiagSocket
from ebpfproxy.model.address import is_loopback

NO_HOLDER = "no process with a descriptor of the socket is found"
_HINT = "run with hostPID and CAP_SYS_PTRACE, unless the socket is just passed between processes"


@dataclasses.dataclass(slots=True)
class Outcome:
    """Of one pass, by cookie. `absent`: found in no network namespace, since they were just closed, or on
    kernels without the hook sock_release. `failed`: why they could not be reconnected."""

    reconnected: set[int] = dataclasses.field(default_factory=set)
    absent: set[int] = dataclasses.field(default_factory=set)
    failed: dict[int, KernelError] = dataclasses.field(default_factory=dict)


def reconnect(proc_root: str, peers: SocketPeers, stale: Mapping[int, StalePeer]) -> Outcome:
    """One pass over `stale`. Raises KernelError where sockets cannot be listed."""
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
    """For each network namespace, those of the stale sockets that are in it. The calling thread is in that
    namespace until the next one is asked for. It ends when all are found."""
    sought = frozenset(each.peer for each in stale.values())
    missing = set(stale)
    with contextlib.closing(namespaces.opened_network_namespaces(proc_root)) as descriptors:
        for descriptor in descriptors:
            if not missing:
                return
            with namespaces.in_namespace(descriptor):
                found = [each for each in sockets.connected_udp(sought) if each.cookie in missing]
                missing.difference_update(each.cookie for each in found)
                yield namespaces.identity_of_descriptor(descriptor), found


def _locate(
    proc_root: str, stale: Mapping[int, StalePeer]
) -> tuple[dict[int, DiagSocket], Collection[namespaces.Identity]]:
    """Stale sockets by inode, and the network namespaces they are in."""
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
    """The sockets of one process. What is settled is removed from `located`; another process may hold the
    rest."""
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
    except Unsupported as failure:  # so it is for each descriptor of this process
        outcome.failed.update((located[each.inode].cookie, failure) for each in held if each.inode in located)
    finally:
        duplicates.close(process)


def _try(process: int, descriptor: int, found: DiagSocket, peers: SocketPeers, outcome: Outcome) -> bool:
    """Whether the socket needs nothing more. Raises Unsupported where duplicating is not permitted."""
    try:
        with duplicates.duplicated(process, descriptor, found) as sock:
            stale = peers.of(found.cookie)
            if stale and duplicates.peer(sock) in (stale.frontend, stale.peer):
                if stale.waiting and is_loopback(found.source):  # a NodePort: endpoints are elsewhere
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
