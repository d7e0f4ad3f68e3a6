"""Clients of Services: sockets that belong to a pod or to the node, and what comes of dialing with them."""

import collections
import concurrent.futures
import contextlib
import errno
import itertools
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from ebpfproxy.lab import Netns, sockets
from ebpfproxy.model.address import Protocol

REFUSED, SILENT, DENIED = "refused", "silent", "denied"
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)

TCP, UDP = Protocol.TCP, Protocol.UDP
FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}
KINDS = {TCP: socket.SOCK_STREAM, UDP: socket.SOCK_DGRAM}

new_ports = itertools.cycle(range(11_000, 30_000))
"""Neither servers', nor NodePorts, nor any that the kernel chooses: one of those may be that of a flow which
is still remembered, and goes on to its endpoint. TCP keeps those of connections that were closed, too."""


def socket_in(place: Netns, protocol: Protocol, family: int = socket.AF_INET) -> socket.socket:
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


def connected(place: Netns, protocol: Protocol, address: str, port: int) -> socket.socket:
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
    """Say something on a connected socket, and return the answer, or SILENT where none comes.

    A datagram whose flow is ended before its answer is back gets none: the answer is not translated then.
    """
    client.sendall(b"?")
    try:
        return client.recv(1 << 16).decode()
    except TimeoutError:
        return SILENT


def ask_from(client: socket.socket, address: str, port: int) -> tuple[str, tuple[str, int]]:
    """As `sockets.ask_unconnected`, with a socket that is there already."""
    client.sendto(b"?", (address, port))
    answer, peer = client.recvfrom(1 << 16)
    return answer.decode(), (peer[0], peer[1])


def outcome(
    place: Netns, protocol: Protocol, address: str, port: int, timeout: float = sockets.ANSWERED
) -> str:
    """The server's answer, REFUSED, SILENT where nobody says anything (no way included), or DENIED where
    sending it is not permitted (EPERM).

    `timeout` in seconds: less where silence is expected, so that it is not waited for in vain.
    """
    return place.call(lambda: _outcome(protocol, address, port, timeout))


def _outcome(
    protocol: Protocol, address: str, port: int, timeout: float, source: tuple[str, int] = ("", 0)
) -> str:
    try:
        return sockets.ask(protocol, address, port, timeout, source)
    except ConnectionRefusedError:
        return REFUSED
    except PermissionError:
        return DENIED
    except OSError as error:
        if isinstance(error, TimeoutError):
            return SILENT
        if error.errno in _NO_WAY:
            # Shown where a test fails: that there is no way is another matter than a lost packet. Not
            # logged: pytest keeps the log in memory, and this is another process.
            sys.stderr.write(f"{protocol.name} {address} {port}: {error}\n")
            return SILENT
        raise


class Dial(NamedTuple):
    """What a client dials, and from where; `timeout` in seconds."""

    protocol: Protocol
    address: str
    port: int
    timeout: float = sockets.ANSWERED
    source: tuple[str, int] = ("", 0)


def outcomes(place: Netns, dials: Sequence[Dial]) -> list[str]:
    """The outcome of each, all at the same time; none needs another's patience."""

    def all_of_them() -> list[str]:
        with concurrent.futures.ThreadPoolExecutor(max(1, len(dials))) as threads:
            return list(threads.map(lambda dial: _outcome(*dial), dials))

    return place.call(all_of_them)


def ping(place: Netns, address: str, payload: bytes = b"ebpfproxy", timeout: float = 1.0) -> str:
    """The address that answers an ICMP echo, with what it was sent; SILENT where nobody does."""
    family, kind = family_of(address), 128 if ":" in address else 8
    protocol = socket.IPPROTO_ICMPV6 if ":" in address else socket.IPPROTO_ICMP

    def exchange() -> str:
        with socket.socket(family, socket.SOCK_DGRAM, protocol) as client:
            client.settimeout(timeout)
            client.sendto(struct.pack("!BBHHH", kind, 0, 0, 0, 1) + payload, (address, 0))
            try:
                answer, peer = client.recvfrom(1 << 16)
            except TimeoutError:
                return SILENT
            assert answer[8:] == payload
            return str(peer[0])

    return place.call(exchange)


def answers(
    place: Netns, protocol: Protocol, address: str, port: int, count: int = 30
) -> collections.Counter[str]:
    """How often each server answered `count` new connections, or flows, of one process. Raises OSError."""
    sources = list(itertools.islice(new_ports, count)) if protocol is UDP else [0] * count
    return place.call(
        lambda: collections.Counter(
            sockets.ask(protocol, address, port, source=("", source)) for source in sources
        ),
        timeout=90,
    )


def first_to_answer(address: str, port: int, patience: float) -> str:
    """Dial until somebody answers, in the calling process. Raises TimeoutError."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return sockets.ask(TCP, address, port, 0.05)
    raise TimeoutError(f"{address} port {port} did not answer within {patience} s")
