"""Sockets of another network namespace and cgroup, for use by this process.

A socket keeps both, whichever process holds its descriptor. So one process in each of them creates the
sockets of all clients there. A fork of a test worker for each client takes 7 ms of CPU time or more.
"""

import os
import socket
import struct
import threading
import weakref

from ebpfproxy.lab.netns import Netns
from ebpfproxy.lab.sockets import Create

_REQUEST = struct.Struct("=iii")
_PATIENCE = 60.0  # seconds for a socket
_ERROR = struct.Struct("=i")  # errno, 0 with a descriptor


class _Maker:
    def __init__(self, netns: Netns) -> None:
        from tests.support import preloaded  # not in the process that creates the sockets

        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            preloaded.start(netns, [__file__], theirs.fileno())
        self._channel.settimeout(_PATIENCE)
        self._lock = threading.Lock()

    def create(self, family: int, kind: int, protocol: int) -> socket.socket:
        """Raises OSError; ConnectionError if the process has ended."""
        with self._lock:
            self._channel.send(_REQUEST.pack(family, kind, protocol))
            raw, descriptors, _, _ = socket.recv_fds(self._channel, _ERROR.size, 1)
        if not raw:
            raise ConnectionResetError
        if not descriptors:
            number = _ERROR.unpack(raw)[0]
            raise OSError(number, os.strerror(number))
        return socket.socket(fileno=descriptors[0])


_makers: weakref.WeakKeyDictionary[Netns, tuple[int, _Maker]] = weakref.WeakKeyDictionary()
"""With the process that started it: a forked child must not share its socket."""
_starts = threading.Lock()


def creating_in(netns: Netns) -> Create:
    """A function that creates sockets there."""

    def create(family: int, kind: int, protocol: int = 0) -> socket.socket:
        try:
            return _maker(netns).create(family, kind, protocol)
        except ConnectionError:  # the processes of a pod were killed
            with _starts:
                _makers.pop(netns, None)
            return _maker(netns).create(family, kind, protocol)

    return create


def _maker(netns: Netns) -> _Maker:
    with _starts:
        owner, maker = _makers.get(netns, (0, None))
        if maker is None or owner != os.getpid():
            maker = _Maker(netns)
            _makers[netns] = os.getpid(), maker
        return maker


def main() -> None:
    """Serve the process at the other end of standard output."""
    channel = socket.socket(fileno=1)
    while request := channel.recv(_REQUEST.size):
        try:
            created = socket.socket(*_REQUEST.unpack(request))
        except OSError as failure:
            channel.send(_ERROR.pack(failure.errno or 0))
            continue
        with created:
            socket.send_fds(channel, [_ERROR.pack(0)], [created.fileno()])


if __name__ == "__main__":
    main()
