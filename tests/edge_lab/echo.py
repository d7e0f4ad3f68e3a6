"""A server that sends everything back, for thousands of connections in one process."""

import contextlib
import os
import resource
import select

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.model.address import Protocol

_BACKLOG = 65535


def start(pod: Pod, port: int) -> None:
    """Serve the port in the pod, in a process of its own, until the lab ends. Returns once it listens."""

    def child(ready: int) -> None:
        raise_limit()
        listener = sockets.listening(Protocol.TCP, port)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        os.write(ready, b"!")
        os.close(ready)
        poll = select.epoll()
        poll.register(listener, select.EPOLLIN)
        while True:
            for number, _ in poll.poll():
                if number != listener.fileno():
                    _echo(number)
                    continue
                with contextlib.suppress(BlockingIOError):
                    while True:
                        accepted = listener.accept()[0]
                        accepted.setblocking(False)
                        poll.register(accepted.detach(), select.EPOLLIN)

    pod.start_until_ready(child)


def raise_limit() -> None:
    """Let the process open as many files as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _echo(number: int) -> None:
    try:
        received = os.read(number, 4096)
        if received:
            os.write(number, received)
            return
    except OSError:
        pass
    os.close(number)  # the kernel removes it from the epoll instance
