"""Pipes through which large transfers pass from one socket to the other inside the kernel (splice(2)).

A pipe is used for a moment, and then by other connections. It stays with a connection only while it holds
bytes that the other side does not take. So few pipes are enough for many connections.
"""

import contextlib
import fcntl
import os

_SIZE = 1 << 20
_MOST = 32
"""Pipes of a relay. Each holds up to 1 MiB of kernel memory. Without a free one, bytes are copied."""


class Pipe:
    """An empty pipe, or one that holds `count` bytes."""

    __slots__ = ("_reading", "_writing", "count")

    def __init__(self) -> None:
        """Raises OSError."""
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.count = 0
        with contextlib.suppress(OSError):  # more than the user may have: it keeps its size
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _SIZE)

    def fill(self, source: int) -> int:
        """Take bytes of a socket; return how many. 0: it has sent everything. Raises OSError, BlockingIOError
        if it has none.
        """
        self.count = os.splice(source, self._writing, _SIZE, flags=os.SPLICE_F_NONBLOCK)
        return self.count

    def drain(self, sink: int) -> None:
        """Give the bytes to a socket. Raises OSError, BlockingIOError if it does not take all."""
        while self.count:
            self.count -= os.splice(self._reading, sink, self.count, flags=os.SPLICE_F_NONBLOCK)

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


class Pipes:
    """The pipes of a relay."""

    def __init__(self) -> None:
        self._free: list[Pipe] = []
        self._made = 0

    def take(self) -> Pipe | None:
        """Return an empty pipe, None if there are too many or the system cannot splice."""
        if self._free:
            return self._free.pop()
        if self._made == _MOST or not hasattr(os, "splice"):
            return None
        try:
            made = Pipe()
        except OSError:
            return None
        self._made += 1
        return made

    def give_back(self, pipe: Pipe) -> None:
        """Take a pipe back; one that holds bytes is closed."""
        if pipe.count:
            pipe.close()
            self._made -= 1
        else:
            self._free.append(pipe)


POOL = Pipes()
