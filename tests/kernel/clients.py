"""Clients of Services: sockets that belong to a pod or to the node, and what comes of dialing with them."""

import collections
import contextlib
import errno
import socket
import time

from ebpfproxy.lab import Place, sockets
from ebpfproxy.model.address import Protocol

REFUSED, SILENT = "refused", "silent"
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)

TCP, UDP = Protocol.TCP, Protocol.UDP
FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}
KINDS = {TCP: socket.SOCK_STREAM, UDP: socket.SOCK_DGRAM}


def socket_in(place: Place, protocol: Protocol, family: int = socket.AF_INET) -> socket.socket:
    """A socket that was made in the place, for use by the caller: the kernel keeps it in that cgroup and
    network namespace wherever its descriptor goes."""
    ours, theirs = socket.socketpair()

    def make() -> None:
        with socket.socket(family, KINDS[protocol]) as made:
            socket.send_fds(theirs, [b"!"], [made.fileno()])

    with ours, theirs:
        place.call(make)
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    received = socket.socket(fileno=fd)
    received.settimeout(3.0)
    return received


def connected(place: Place, protocol: Protocol, address: str, port: int) -> socket.socket:
    """A socket of the place that is connected. Raises OSError."""
    made = socket_in(place, protocol, family_of(address))
    try:
        made.connect((address, port))
    except BaseException:
        made.close()
        raise
    return made


def family_of(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def converse(client: socket.socket) -> str:
    """Say something on a connected socket, and return the answer."""
    client.sendall(b"?")
    return client.recv(1 << 16).decode()


def ask_from(client: socket.socket, address: str, port: int) -> tuple[str, tuple[str, int]]:
    """As `sockets.ask_unconnected`, with a socket that is there already."""
    client.sendto(b"?", (address, port))
    answer, peer = client.recvfrom(1 << 16)
    return answer.decode(), (peer[0], peer[1])


def outcome(place: Place, protocol: Protocol, address: str, port: int, timeout: float = 0.5) -> str:
    """The server's answer, REFUSED, or SILENT where nobody says anything (no way included)."""
    return place.call(lambda: _outcome(protocol, address, port, timeout))


def _outcome(protocol: Protocol, address: str, port: int, timeout: float) -> str:
    try:
        return sockets.ask(protocol, address, port, timeout)
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return SILENT
    except OSError as error:
        if error.errno in _NO_WAY:
            return SILENT
        raise


def answers(
    place: Place, protocol: Protocol, address: str, port: int, count: int = 30
) -> collections.Counter[str]:
    """How often each server answered `count` new connections of one process. Raises OSError."""
    return place.call(
        lambda: collections.Counter(sockets.ask(protocol, address, port) for _ in range(count)), timeout=90
    )


def first_to_answer(address: str, port: int, patience: float) -> str:
    """Dial until somebody answers, in the calling process. Raises TimeoutError."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return sockets.ask(TCP, address, port, 0.05)
    raise TimeoutError(f"{address} port {port} did not answer within {patience} s")
