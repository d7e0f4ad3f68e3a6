"""A Python module in a child process, with one socket between parent and child.

The child must end when it reads the end of that socket. So it ends with its parent, however the parent ends,
also when the parent replaces itself by execve(2): the parent's end of the socket is closed then (O_CLOEXEC).
"""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ebpfproxy.errors import Rejected

_END_SECONDS = 5.0


def python(*arguments: str) -> list[str]:
    """The command of a child process in Python that has the modules of this process.

    `python -m` imports from the current folder first. An agent can be started in a folder where anybody can
    have put a package `ebpfproxy`, which would run as root. -P (Python 3.11) leaves that folder out. It stays
    if this process was started so, as `python -m ebpfproxy` in a checkout that is not installed.
    """
    from_here = sys.path[:1] in ([""], [str(Path.cwd())])
    return [sys.executable, *(() if from_here else ("-P",)), *arguments]


class Child:
    """A running child process. `socket` is the parent's end: a stream."""

    def __init__(self, module: str, arguments: Sequence[str] = ()) -> None:
        """Start `python -m module FD ARGUMENTS`, in the calling thread's network namespace. FD is the file
        descriptor of the child's end.

        The child starts with SIGINT and SIGTERM blocked. A Ctrl-C reaches the complete process group, but
        only the parent must handle it. Raises Rejected.
        """
        self.socket, theirs = socket.socketpair()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                python("-m", module, str(theirs.fileno()), *arguments),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except OSError as failure:
            self.socket.close()
            raise Rejected(f"cannot start {module}: {failure.strerror}") from failure
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()

    @property
    def pid(self) -> int:
        """The process ID."""
        return self._process.pid

    def wait(self) -> int:
        """Wait for the end of the child; return its exit code, negative for a signal."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill the child. Does nothing if it has ended. The caller must still `wait` or `end`."""
        self._process.kill()

    def end(self, seconds: float = _END_SECONDS) -> None:
        """Close the socket, so that the child ends. Kill it after `seconds`."""
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return
        self._process.kill()
        self._process.wait()
