"""A server that sends everything back, for a hundred thousand connections in one process."""

import contextlib
import os
import resource
import select

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.model.address import Protocol

OPEN_FILES = 1_000_000
_BACKLOG = 65535


def start(pod: Pod, *ports: int) -> None:
    """Serve the ports in the pod until the lab ends. Returns once they accept connections."""

    def child(ready: int) -> None:
        raise_limit()
        listeners = {}
        for port in ports:
            listener = sockets.listening(Protocol.TCP, port)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            listeners[listener.fileno()] = listener
        os.write(ready, b"!")
        os.close(ready)
        poll = select.epoll()
        for number in listeners:
            poll.register(number, select.EPOLLIN)
        while True:
            for number, _ in poll.poll():
                if number in listeners:
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            accepted = listeners[number].accept()[0]
                            accepted.setblocking(False)
                            poll.register(accepted.detach(), select.EPOLLIN)
                else:
                    _echo(number)

    pod.start_until_ready(child)


def raise_limit() -> None:
    """Let the process open many sockets."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


def _echo(number: int) -> None:
    try:
        received = os.read(number, 4096)
        if received:
            os.write(number, received)
            return
    except OSError:
        pass
    os.close(number)  # the kernel removes it from the epoll instance
