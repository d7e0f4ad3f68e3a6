"""A download of any duration that the client ends; its end shows whether all data arrived."""

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
_AT_ONCE = 1 << 18  # bytes for one recv()
_EXPECTED = _PERIOD * (_AT_ONCE // len(_PERIOD) + 2)  # enough for one recv() from any offset in the period
_LENGTH = 8  # bytes at the end with the number of bytes before
_PAUSE_MS = 50  # between two blocks: 40 KB/s. With 10 ms, six downloads used half of a slow VM
_PATIENCE = 30.0


def offer(pod: Pod, port: int) -> Call[None]:
    """Serve downloads in a pod: blocks until the client closes its side, then the number of bytes.

    Returns once the server listens. It runs until it is killed or the lab ends.
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
    """A started download. Received data is compared and not kept, so that the duration is unlimited."""

    def __init__(self, netns: Pod, address: str, port: int) -> None:
        """Raises OSError."""
        self._socket = connected(netns, TCP, address, port)
        self._socket.settimeout(_PATIENCE)
        self._compared = 0  # bytes
        self._broken = False
        self._tail = b""  # not yet compared: may be the length
        self._error: OSError | None = None
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()
        assert self._began.wait(_PATIENCE), f"no data from {address}"

    def finish(self) -> int:
        """End the download; the number of bytes. Raises OSError if the connection failed, AssertionError if
        data is missing or wrong."""
        with self._socket:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            self._thread.join(_PATIENCE)
        if self._error:
            raise self._error
        sent = int.from_bytes(self._tail)
        assert self._compared == sent, f"received {self._compared} of {sent} bytes"
        assert not self._broken, f"the {sent} received bytes differ from those sent"
        return sent

    @property
    def received(self) -> int:
        """The number of bytes received so far."""
        return self._compared + len(self._tail)

    def _receive(self) -> None:
        try:
            while chunk := self._socket.recv(_AT_ONCE):
                self._compare(self._tail + chunk)
                self._began.set()
        except OSError as error:
            self._error = error

    def _compare(self, received: bytes) -> None:
        complete = max(0, len(received) - _LENGTH)
        begin = self._compared % len(_PERIOD)
        self._broken |= received[:complete] != _EXPECTED[begin : begin + complete]
        self._compared += complete
        self._tail = received[complete:]
