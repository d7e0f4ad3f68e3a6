"""A download that lasts as long as its client wants, and an end that tells whether all of it came."""

import contextlib
import os
import select
import socket
import threading

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.lab.netns import Call
from tests.kernel.clients import TCP, connected

_PERIOD = bytes(range(256))
_BLOCK = _PERIOD * 8
_AT_ONCE = 1 << 18  # received
_EXPECTED = _PERIOD * (_AT_ONCE // len(_PERIOD) + 2)  # as much, from anywhere in the period on
_LENGTH = 8  # bytes at the end that tell how many there were before
_PAUSE_MS = 50  # between two blocks: 40 KB a second show a break; with 10 ms six took half of a slow VM
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
        connection.sendall(sent.to_bytes(_LENGTH))


class Download:
    """One that has begun. What has come is looked at and not kept, so that one may last."""

    def __init__(self, place: Pod, address: str, port: int) -> None:
        """Raises OSError."""
        self._socket = connected(place, TCP, address, port)
        self._socket.settimeout(_PATIENCE)
        self._compared = 0  # bytes
        self._broken = False
        self._tail = b""  # not compared yet: it may be the length
        self._error: OSError | None = None
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()
        assert self._began.wait(_PATIENCE), f"nothing came from {address}"

    def finish(self) -> int:
        """Have it end; how many bytes it was. Raises OSError where it broke, AssertionError where some of it
        is missing, or not what was sent."""
        with self._socket:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            self._thread.join(_PATIENCE)
        if self._error:
            raise self._error
        told = int.from_bytes(self._tail)
        assert self._compared == told, f"{self._compared} bytes of {told}"
        assert not self._broken, f"not the {told} bytes that were sent"
        return told

    @property
    def received(self) -> int:
        """How many bytes, so far."""
        return self._compared + len(self._tail)

    def _receive(self) -> None:
        try:
            while chunk := self._socket.recv(_AT_ONCE):
                self._compare(self._tail + chunk)
                self._began.set()
        except OSError as error:
            self._error = error

    def _compare(self, come: bytes) -> None:
        whole = max(0, len(come) - _LENGTH)
        begin = self._compared % len(_PERIOD)
        self._broken |= come[:whole] != _EXPECTED[begin : begin + whole]
        self._compared += whole
        self._tail = come[whole:]
