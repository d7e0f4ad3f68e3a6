"""Clients of Services: sockets that belong to a pod or to the node, and the results of connecting."""

import collections
import concurrent.futures
import errno
import itertools
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from ebpfproxy.lab import Netns, Pod, sockets
from ebpfproxy.model.address import Protocol
from tests.support.foreign_sockets import creating_in

REFUSED, SILENT, DENIED = "refused", "silent", "denied"
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)

TCP, UDP = Protocol.TCP, Protocol.UDP
FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}
KINDS = {TCP: socket.SOCK_STREAM, UDP: socket.SOCK_DGRAM, Protocol.SCTP: socket.SOCK_STREAM}

new_ports = itertools.cycle(range(11_000, 30_000))
"""Source ports that are no servers' ports, no NodePorts and no ephemeral ports. An ephemeral port may belong
to a flow that still exists, whose endpoint the new flow would get. TCP also keeps ports of closed
connections."""


def socket_in(netns: Netns, protocol: Protocol, family: int = socket.AF_INET) -> socket.socket:
    """A socket of a netns for use by the caller. The kernel keeps its cgroup and network namespace, whichever
    process holds the descriptor."""
    received = creating_in(netns)(family, KINDS[protocol], protocol)
    received.settimeout(3.0)
    return received


def connected(
    netns: Netns, protocol: Protocol, address: str, port: int, timeout: float = 3.0
) -> socket.socket:
    """A connected socket of a netns, which waits for `timeout` seconds from now on, too. Raises OSError."""
    made = socket_in(netns, protocol, family_of(address))
    made.settimeout(timeout)
    try:
        made.connect((address, port))
    except BaseException:
        made.close()
        raise
    return made


def family_of(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def converse(client: socket.socket) -> str:
    """Send something on a connected socket and return the reply, or SILENT without a reply.

    A datagram gets no reply if its flow ends before: then the reply is not translated.
    """
    client.sendall(b"?")
    try:
        return client.recv(1 << 16).decode()
    except TimeoutError:
        return SILENT


def ask_from(client: socket.socket, address: str, port: int) -> tuple[str, tuple[str, int]]:
    """As `datagrams.ask_unconnected`, with an existing socket."""
    client.sendto(b"?", (address, port))
    answer, peer = client.recvfrom(1 << 16)
    return answer.decode(), (peer[0], peer[1])


def outcome(
    netns: Netns, protocol: Protocol, address: str, port: int, timeout: float = sockets.ANSWERED
) -> str:
    """The server's reply, REFUSED, SILENT if there is no reply or no route, or DENIED if sending is not
    permitted (EPERM).

    `timeout` in seconds: tests that expect silence pass a smaller one, to save time.
    """
    return outcome_of(Dial(protocol, address, port, timeout), creating_in(netns))


def outcome_of(dial: "Dial", create: sockets.Create = socket.socket) -> str:
    """As `outcome`, with a socket of this process or one that `create` returns."""
    try:
        return sockets.ask(*dial, create)
    except ConnectionRefusedError:
        return REFUSED
    except PermissionError:
        return DENIED
    except OSError as error:
        if isinstance(error, TimeoutError):
            return SILENT
        if error.errno in _NO_ROUTE:
            # Shown if the test fails, to distinguish a missing route from a lost packet.
            sys.stderr.write(f"{dial.protocol.name} {dial.address} {dial.port}: {error}\n")
            return SILENT
        raise


def rejection(netns: Netns, protocol: Protocol, address: str, port: int) -> tuple[str, int]:
    """REFUSED or DENIED, and how often the client sent its SYN again before that (0 for other protocols).

    A SYN that was dropped is sent again after one second. So its number shows without a clock whether a
    client was rejected at once. Raises TimeoutError if the client is not rejected.
    """
    with creating_in(netns)(family_of(address), KINDS[protocol], 0) as client:
        client.settimeout(sockets.ANSWERED)
        try:
            client.connect((address, port))
            client.sendall(b"?")
            answer = client.recv(1 << 16)
        except (ConnectionRefusedError, PermissionError) as failure:
            found = REFUSED if isinstance(failure, ConnectionRefusedError) else DENIED
            return found, _retransmissions(client) if protocol is TCP else 0
    raise AssertionError(f"{address} port {port} answered {answer!r}")


def _retransmissions(client: socket.socket) -> int:
    """tcpi_total_retrans of struct tcp_info (include/uapi/linux/tcp.h)."""
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("=I", info, 100)[0])


class Dial(NamedTuple):
    """A client's destination and source; `timeout` in seconds."""

    protocol: Protocol
    address: str
    port: int
    timeout: float = sockets.ANSWERED
    source: tuple[str, int] = ("", 0)


def outcomes(netns: Netns, dials: Sequence[Dial]) -> list[str]:
    """The outcome of each, all at the same time, so that they share the waiting time."""
    create = creating_in(netns)
    with concurrent.futures.ThreadPoolExecutor(max(1, len(dials))) as threads:
        return list(threads.map(lambda dial: outcome_of(dial, create), dials))


def ping(netns: Netns, address: str, payload: bytes = b"ebpfproxy", timeout: float = 1.0) -> str:
    """The address that answers an ICMP echo request with the same data; SILENT without a reply."""
    family, kind = family_of(address), 128 if ":" in address else 8
    protocol = socket.IPPROTO_ICMPV6 if ":" in address else socket.IPPROTO_ICMP

    with creating_in(netns)(family, socket.SOCK_DGRAM, protocol) as client:
        client.settimeout(timeout)
        client.sendto(struct.pack("!BBHHH", kind, 0, 0, 0, 1) + payload, (address, 0))
        try:
            answer, peer = client.recvfrom(1 << 16)
        except TimeoutError:
            return SILENT
        assert answer[8:] == payload
        return str(peer[0])


def answers(
    netns: Netns, protocol: Protocol, address: str, port: int, count: int = 30
) -> collections.Counter[str]:
    """The number of replies of each server to `count` new connections or flows of one process. Raises
    OSError."""
    sources = list(itertools.islice(new_ports, count)) if protocol is UDP else [0] * count
    create = creating_in(netns)
    return collections.Counter(
        sockets.ask(protocol, address, port, source=("", source), create=create) for source in sources
    )


def connected_from(
    netns: Pod, protocol: Protocol, source: tuple[str, int], to: tuple[str, int]
) -> socket.socket:
    """A connected socket in the network namespace, bound to this address and port. Raises OSError."""
    made = socket_in(netns, protocol, FAMILIES["v6" if ":" in to[0] else "v4"])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(source)
    made.connect(to)
    return made


def first_to_answer(address: str, port: int, patience: float, create: sockets.Create = socket.socket) -> str:
    """Connect until a server answers. Raises TimeoutError.

    On a busy machine an answer may take longer than the first attempts wait. Attempts that are refused follow
    each other slowly: the kernel sends at most 50 ICMP errors at once (icmp_msgs_burst), and a SYN without an
    answer is sent again only after a second.
    """
    deadline, wait = time.monotonic() + patience, 0.05
    while time.monotonic() < deadline:
        try:
            return sockets.ask(TCP, address, port, wait, create=create)
        except TimeoutError:
            wait = min(wait * 1.2, 2.0)
        except OSError:
            time.sleep(0.005)
    raise TimeoutError(f"{address} port {port} did not answer within {patience} s")
