"""Locks that the kernel releases when their holder exits, for any reason, and that leave no files behind.

- `FolderLock` locks a folder with flock(2).
- `NamespaceLock` locks a network namespace with an abstract unix(7) address, which only one socket can bind.
"""

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
"""Default patience.

If a process is killed while it starts another one, the child holds copies of its descriptors until execve(2)
closes them (O_CLOEXEC). This took up to 20 ms on a busy machine.
"""


class FolderLock:
    """An exclusive lock on a folder, from construction until `release`.

    A child process that inherits `fd` holds the lock as well.
    """

    def __init__(self, folder: Path, patience: float = EXEC_SECONDS) -> None:
        """Take the lock; wait up to `patience` seconds for another holder.

        Raises AlreadyExists if another process still holds it then, NotFound if `folder` does not exist, and
        Rejected if `folder` cannot be opened.
        """
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
        """Release the lock; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class NamespaceLock:
    """A lock on the devices and rules of the calling thread's network namespace, from construction until
    `release`.

    Abstract addresses of Unix sockets belong to a network namespace (unix_find_socket_byname() of
    net/unix/af_unix.c). The kernel frees the address when the socket is closed.
    """

    _ADDRESS = b"\0ebpfproxy"

    def __init__(self, patience: float = EXEC_SECONDS) -> None:
        """Take the lock; wait up to `patience` seconds for another holder.

        Raises AlreadyExists if another process still holds it then, and Rejected if the address cannot be
        bound.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            taken = _succeeds(self._taken, patience)
        except OSError as failure:
            self._socket.close()
            raise Rejected(f"cannot lock this network namespace: {failure.strerror}") from failure
        if not taken:
            self._socket.close()
            raise AlreadyExists(
                "another ebpfproxy agent runs in this network namespace",
                "stop that agent, or run this one with --proxy-mode=ebpf --tc-devices=none",
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
        """Release the lock; a second call does nothing."""
        self._socket.close()


def _succeeds(attempt: Callable[[], bool], patience: float) -> bool:
    """Whether `attempt` succeeds within `patience` seconds. It is called at least once."""
    deadline = time.monotonic() + patience
    while not attempt():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
