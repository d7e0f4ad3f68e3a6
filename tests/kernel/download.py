"""A download that lasts as long as its client wants, and an end that tells whether all of it came."""

import contextlib
import os
import select
import socket
import threading

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.lab.place import Call
from tests.kernel.clients import TCP, connected

_BLOCK = bytes(range(256)) * 32
_PAUSE_MS = 2  # between two blocks: 4 MB a second are many packets, and leave the machine to others
_PATIENCE = 30.0


def offer(pod: Pod, port: int) -> Call[None]:
    """Send whoever connects one block after another, until that side is closed; then how many bytes it was.

    Returns once clients are served; the server runs until it is killed, or the lab ends.
    """

    def child(ready: int) -> None:
        listener = sockets.listening(TCP, port)
        os.write(ready, b"!")
        while True:
            threading.Thread(target=_send, args=(listener.accept()[0],), daemon=True).start()

    return pod.start_until_ready(child)


def _send(connection: socket.socket) -> None:
    with connection, contextlib.suppress(ConnectionError):
        sent = 0
        closed = select.poll()
        closed.register(connection, select.POLLIN)
        while not closed.poll(_PAUSE_MS):
            connection.sendall(_BLOCK)
            sent += len(_BLOCK)
        connection.sendall(sent.to_bytes(8))


class Download:
    """One that has begun."""

    def __init__(self, place: Pod, address: str, port: int) -> None:
        """Raises OSError."""
        self._socket = connected(place, TCP, address, port)
        self._socket.settimeout(_PATIENCE)
        self._received = bytearray()
        self._error: OSError | None = None
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()
        assert self._began.wait(_PATIENCE), f"nothing came from {address}"

    def finish(self) -> int:
        """Have it end; how many bytes it was. Raises OSError where it broke, AssertionError where some of it
        is missing."""
        with self._socket:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            self._thread.join(_PATIENCE)
        if self._error:
            raise self._error
        body, told = self._received[:-8], int.from_bytes(self._received[-8:])
        assert len(body) == told, f"{len(body)} bytes of {told}"
        assert body == _BLOCK * (told // len(_BLOCK))
        return told

    @property
    def received(self) -> int:
        """How many bytes, so far."""
        return len(self._received)

    def _receive(self) -> None:
        try:
            while chunk := self._socket.recv(1 << 18):
                self._received += chunk
                self._began.set()
        except OSError as error:
            self._error = error
