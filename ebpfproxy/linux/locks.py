"""Locks that the kernel releases when their holder exits, for any reason, and that leave no files behind.

- `FolderLock` locks a folder with flock(2).
- `NamespaceLock` locks a network namespace with a UDP socket. The kernel shows its user.

Users other than root cannot hold them against an agent that runs as root.
"""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from ebpfproxy.errors import AlreadyExists, NotFound, Rejected

_POLL_SECONDS = 0.05
EXEC_SECONDS = 1.0
"""Default patience.

If a process is killed while it starts another one, the child holds copies of its descriptors until execve(2)
closes them (O_CLOEXEC). This took up to 20 ms on a busy machine.
"""

_ADDRESS = "127.101.98.112"
"""An address of loopback: packets from other hosts do not reach it."""
_SOCKETS = Path("/proc/thread-self/net/udp")
_LOCAL, _UID = 1, 7  # columns of _SOCKETS
_IP_FREEBIND = 15  # include/uapi/linux/in.h


class FolderLock:
    """An exclusive lock on a folder, from construction until `release`.

    A child process that inherits `fd` holds the lock as well. Any user who may open the folder may lock it,
    so only its owner keeps permissions.
    """

    def __init__(self, folder: Path, patience: float = EXEC_SECONDS) -> None:
        """Take the lock; wait up to `patience` seconds for another holder.

        Raises AlreadyExists if another process still holds it then, NotFound if `folder` does not exist, and
        Rejected if `folder` cannot be opened or belongs to a user other than root and this process's user.
        """
        try:
            self.fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{folder} does not exist") from None
        except OSError as failure:
            raise Rejected(f"cannot lock {folder}: {failure.strerror}", "run as root") from failure
        try:
            self._close_to_others(folder)
        except Rejected:
            self.release()
            raise
        if not _succeeds(self._taken, patience):
            os.close(self.fd)
            raise AlreadyExists(f"another ebpfproxy holds {folder}")

    def _close_to_others(self, folder: Path) -> None:
        status = os.fstat(self.fd)
        if status.st_uid not in (0, os.geteuid()):
            raise Rejected(
                f"cannot lock {folder}: it belongs to user {status.st_uid}",
                "remove it, and let only root write to the folder above it; a bpffs has the option mode=0700",
            )
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:
            try:
                os.fchmod(self.fd, 0o700)
            except OSError as failure:
                raise Rejected(f"cannot lock {folder}: {failure.strerror}") from failure

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class NamespaceLock:
    """A lock on the devices and rules of the calling thread's network namespace, from construction until
    `release`.

    Each holder has a UDP socket at an address of this lock, and the kernel shows its user (udp4_seq_show() of
    net/ipv4/udp.c). Only sockets of root and of this process's user count. A process takes the lock by
    finding no other socket that counts, after it has bound its own. See docs/decisions/0029.
    """

    def __init__(self, patience: float = EXEC_SECONDS) -> None:
        """Take the lock; wait up to `patience` seconds for another holder.

        Raises AlreadyExists if another process still holds it then, and Rejected if the socket cannot be
        bound, or if the kernel does not show it.
        """
        self._socket: socket.socket | None = None
        try:
            taken = _succeeds(self._taken, patience)
        except OSError as failure:
            self.release()
            raise Rejected(f"cannot lock this network namespace: {failure.strerror}") from failure
        except Rejected:
            self.release()
            raise
        if not taken:
            self.release()
            raise AlreadyExists(
                "another ebpfproxy agent runs in this network namespace",
                "stop that agent, or run this one with --proxy-mode=ebpf --tc-devices=none; "
                f"ss --udp --all --processes src {_ADDRESS} shows its process",
            )

    def _taken(self) -> bool:
        """Try once. Of several processes that try at the same time, the one with the lowest port keeps its
        socket until the others have closed theirs."""
        if self._socket is None:
            if _ports():
                return False
            self._socket = _bound()
        own = self._socket.getsockname()[1]
        found = _ports() | _ports()  # a socket that closes while the list is read can hide another one
        if own not in found:
            raise Rejected(f"cannot lock this network namespace: {_SOCKETS} does not show the lock")
        others = found - {own}
        if others and min(others) < own:
            self.release()
        return not others

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _bound() -> socket.socket:
    """A socket at the address of the lock, with a port of the kernel's choice. Raises OSError."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        bound.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)  # loopback may be down
        bound.bind((_ADDRESS, 0))
    except OSError:
        bound.close()
        raise
    return bound


def _ports() -> set[int]:
    """The ports of all sockets at the address of the lock that count. Raises OSError."""
    (number,) = struct.unpack("=I", socket.inet_aton(_ADDRESS))
    prefix, users = f"{number:08X}:", {0, os.geteuid()}
    with _SOCKETS.open() as lines:
        rows = [line.split() for line in lines if f" {prefix}" in line]
    return {
        int(row[_LOCAL].removeprefix(prefix), 16)
        for row in rows
        if row[_LOCAL].startswith(prefix) and int(row[_UID]) in users
    }


def _succeeds(attempt: Callable[[], bool], patience: float) -> bool:
    """Whether `attempt` succeeds within `patience` seconds. It is called at least once."""
    deadline = time.monotonic() + patience
    while not attempt():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
