"""Locks that end with their process, however it ends, and leave nothing behind: one on a folder by
flock(2), one on a network namespace by an address of unix(7) that only one socket in it can have."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ebpfproxy.errors import AlreadyExists, NotFound, Rejected

_POLL_SECONDS = 0.05
EXEC_SECONDS = 1.0
"""Patience where no other is asked for. A process that is killed while it starts another one has its
descriptors there, too, until that one is its program (O_CLOEXEC): 20 ms were seen on a busy machine."""


class FolderLock:
    """Held from its making until `release`. A child process that is given `fd` holds it, too."""

    def __init__(self, folder: Path, patience: float = EXEC_SECONDS) -> None:
        """Raises AlreadyExists where another holds it for `patience` seconds more, NotFound without it."""
        try:
            self.fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFound(f"{folder} does not exist") from None
        except OSError as failure:
            raise Rejected(f"cannot lock {folder}: {failure.strerror}", "run as root") from failure
        if not _succeeds(self._taken, patience):
            os.close(self.fd)
            raise AlreadyExists(f"another ebpfproxy holds {folder}")

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class NamespaceLock:
    """On the devices of the network namespace that the calling thread is in, from its making until `release`.

    Abstract addresses of Unix sockets are of a network namespace (unix_find_socket_byname() of
    net/unix/af_unix.c), and are free again when the socket is closed.
    """

    _ADDRESS = b"\0ebpfproxy"

    def __init__(self, patience: float = EXEC_SECONDS) -> None:
        """Raises AlreadyExists where another holds it for `patience` seconds more, Rejected."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            taken = _succeeds(self._taken, patience)
        except OSError as failure:
            self._socket.close()
            raise Rejected(f"cannot lock this network namespace: {failure.strerror}") from failure
        if not taken:
            self._socket.close()
            raise AlreadyExists(
                "another ebpfproxy has this network namespace: its devices, and its rules",
                "stop that one, whatever its mode and --bpffs-root are; or give this one --proxy-mode=ebpf "
                "and --tc-devices=none",
            )

    def _taken(self) -> bool:
        try:
            self._socket.bind(self._ADDRESS)
        except OSError as failure:
            if failure.errno == errno.EADDRINUSE:
                return False
            raise
        return True

    def release(self) -> None:
        """May be called again."""
        self._socket.close()


def _succeeds(attempt: Callable[[], bool], patience: float) -> bool:
    """Whether it does within so many seconds; it is made at least once."""
    deadline = time.monotonic() + patience
    while not attempt():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
