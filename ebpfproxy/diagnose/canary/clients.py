"""Clients of canary connections: sockets of the node and of pods, and a client outside at an uplink.

A connection is closed as soon as it is established, and no data is sent. Only a UDP client sends an empty
datagram.
"""

import contextlib
import errno
import os
import random
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol as Interface

from ebpfproxy.diagnose.canary import segment
from ebpfproxy.diagnose.canary.result import Locate, Outcome
from ebpfproxy.diagnose.canary.segment import ACK, RST, SYN, Answer, Conversation
from ebpfproxy.diagnose.explain.origin import Origin
from ebpfproxy.diagnose.explain.result import ClientClass, Destination
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf.received_frames import ReceivedFrames
from ebpfproxy.linux.captured_packets import CapturedPackets
from ebpfproxy.linux.netlink import routing
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Address, Family, Protocol, family, format_address, parse_address
from ebpfproxy.model.connection import Connection
from ebpfproxy.model.device import ETHERNET, Device

NO_REPLY = "no reply"

SECONDS = 3.0
"""How long a connection may take. A lost SYN is sent again after one second."""
_DATAGRAM_SECONDS = 0.3
_RESET_SECONDS = 0.3
_PORTS = 49152, 65535

OUTSIDE = {
    Family.IPV4: parse_address("198.51.100.77"),
    Family.IPV6: parse_address("2001:db8:5cab::77"),
}
"""The addresses of a client outside. Both are for documentation (RFC 5737, RFC 3849): no network has them."""

_KINDS = {Protocol.TCP: socket.SOCK_STREAM, Protocol.UDP: socket.SOCK_DGRAM}
_SO_COOKIE = 57


class Client(Interface):
    """`origin`: the client as `explain` classifies it.

    `attempt` makes one connection and returns what happened. It raises KernelError if this machine cannot
    make it.
    """

    origin: Origin

    def attempt(self, destination: Destination, locate: Locate) -> Outcome: ...


class SocketClient:
    """A process of the node, or of a pod if `namespace` is the path of its network namespace."""

    def __init__(self, origin: Origin, namespace: Path | None = None) -> None:
        self.origin = origin
        self._namespace = namespace

    def attempt(self, destination: Destination, locate: Locate) -> Outcome:
        with self._socket(destination) as client:
            return _connected(client, destination, locate)

    @contextlib.contextmanager
    def _socket(self, destination: Destination) -> Iterator[socket.socket]:
        assert destination.protocol
        with netns.entered(self._namespace) if self._namespace else contextlib.nullcontext():
            number = socket.AF_INET if family(destination.address) is Family.IPV4 else socket.AF_INET6
            client = socket.socket(number, _KINDS[destination.protocol])
        with client:
            yield client


def _connected(client: socket.socket, destination: Destination, locate: Locate) -> Outcome:
    assert destination.protocol
    client.setblocking(False)
    number = client.connect_ex((format_address(destination.address), destination.port))
    host, port, *_ = client.getsockname()  # now: a connection that fails loses its address
    if destination.protocol is Protocol.UDP and not number:
        number = _error_of_datagram(client)
    elif number == errno.EINPROGRESS:
        number = _error_of_connect(client)
    own = Connection(
        destination.protocol,
        (parse_address(host), port),
        (destination.address, destination.port),
        struct.unpack("=Q", client.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))[0],
    )
    found = locate(own)
    # A relay that reaches no endpoint has reset the connection meanwhile.
    number = number or client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        return Outcome(NO_REPLY if number == errno.ETIMEDOUT else os.strerror(number), None, found)
    try:
        peer, peer_port, *_ = client.getpeername()
    except OSError as error:
        return Outcome(os.strerror(error.errno or errno.EIO), None, found)
    return Outcome("", (parse_address(peer), peer_port), found)


def _error_of_connect(client: socket.socket) -> int:
    poll = select.poll()
    poll.register(client, select.POLLOUT)
    if not poll.poll(SECONDS * 1000):
        return errno.ETIMEDOUT
    return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def _error_of_datagram(client: socket.socket) -> int:
    """Send an empty datagram, and wait a moment for an answer or an ICMP error; 0 if there is no error."""
    try:
        client.send(b"")
    except OSError as error:
        return error.errno or errno.EIO
    poll = select.poll()
    poll.register(client, select.POLLIN)
    poll.poll(_DATAGRAM_SECONDS * 1000)
    return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


class UplinkClient:
    """A client outside: the uplink receives its packets, as if they had come from the network.

    The replies leave by the uplink, to an address that no network has. The handshake of TCP is not completed:
    the client resets it, so that no server accepts it. With `completes`, it is completed first: a relay
    connects to an endpoint only then.
    """

    def __init__(self, device: Device, completes: bool = False) -> None:
        name = f"outside at {device.name}"
        self.origin = Origin(ClientClass.OUTSIDE, name, tuple(OUTSIDE.values()), device.name, device.ifindex)
        self._device = device
        self._completes = completes

    def attempt(self, destination: Destination, locate: Locate) -> Outcome:
        assert destination.protocol
        own = OUTSIDE[family(destination.address)]
        port = random.randint(*_PORTS)
        of = Conversation(destination.protocol, own, port, destination.address, destination.port)
        self._check(own)
        connection = Connection(of.protocol, (own, port), (destination.address, destination.port))
        with (
            ReceivedFrames(self._device.ifindex) as frames,
            CapturedPackets(self._device.name, own) as packets,
        ):
            exchange = _Exchange(frames, packets, of)
            try:
                answer = exchange.begin()
                error, peer = _outcome(answer, of)
                if self._completes and not error:
                    exchange.complete()
                translation = locate(connection)
                if self._completes and not error and not translation:
                    # A relay that reaches no endpoint has reset the connection meanwhile.
                    error = _later_error(packets, of, time.monotonic() + _RESET_SECONDS)
                    peer = None if error else peer
            finally:
                exchange.reset()
        return Outcome(error, peer, translation)

    def _check(self, own: Address) -> None:
        """Raises KernelError if the replies would not leave by the uplink."""
        if self._device.link_type != ETHERNET:
            raise KernelError(f"{self._device.name} is no Ethernet device")
        if routing.route_to(own).ifindex != self._device.ifindex:
            raise KernelError(f"the route to {format_address(own)} is not by {self._device.name}")


class _Exchange:
    """The packets of one connection. Only TCP has packets to complete and to reset it."""

    def __init__(self, frames: ReceivedFrames, packets: CapturedPackets, of: Conversation) -> None:
        self._frames = frames
        self._packets = packets
        self._of = of
        self._is_tcp = of.protocol is Protocol.TCP
        self._sequence = random.getrandbits(32)
        self._answer: Answer | None = None

    def begin(self) -> Answer | None:
        """Send what begins the connection, and return the first answer."""
        end = time.monotonic() + (SECONDS if self._is_tcp else _DATAGRAM_SECONDS)
        while self._answer is None and (now := time.monotonic()) < end:
            self._send(SYN if self._is_tcp else 0, self._sequence)
            self._answer = _next(self._packets, self._of, min(now + 1, end))
        return self._answer

    def complete(self) -> None:
        if self._is_tcp:
            self._send(ACK, *self._next_numbers())

    def reset(self) -> None:
        if self._is_tcp:
            self._send(RST | ACK if self._answer else RST, *self._next_numbers())

    def _next_numbers(self) -> tuple[int, int]:
        acknowledged = self._answer.sequence + 1 if self._answer else 0
        return (self._sequence + 1) % (1 << 32), acknowledged % (1 << 32)

    def _send(self, flags: int, sequence: int, acknowledged: int = 0) -> None:
        hardware = self._packets.hardware_address
        self._frames.receive(segment.frame(self._of, hardware, flags, sequence, acknowledged))


def _next(packets: CapturedPackets, of: Conversation, deadline: float) -> Answer | None:
    while packet := packets.next(deadline):
        if found := segment.answer(packet, of):
            return found
    return None


def _later_error(packets: CapturedPackets, of: Conversation, deadline: float) -> str:
    """Return the error of the first answer that is one; "" if there is none until `deadline`.

    Other answers do not count: a SYN-ACK that a router sends back to the node is captured again.
    """
    while answer := _next(packets, of, deadline):
        if error := _outcome(answer, of)[0]:
            return error
    return ""


def _outcome(answer: Answer | None, of: Conversation) -> tuple[str, tuple[Address, int] | None]:
    """The error, and the peer as the client sees it."""
    if answer is None:
        return ("", (of.server, of.server_port)) if of.protocol is Protocol.UDP else (NO_REPLY, None)
    if answer.unreachable:
        return f"unreachable, by {format_address(answer.source)}", None
    if of.protocol is Protocol.TCP and answer.flags & RST:
        return os.strerror(errno.ECONNREFUSED), None
    return "", (answer.source, answer.port)
