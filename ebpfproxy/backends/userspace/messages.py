"""What the agent and a relay send each other: requests of the agent, and one answer to each.

A message is a length of four bytes and MessagePack. The entries of addresses are not part of it: the agent
itself sets addresses.
"""

import enum
import os
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ebpfproxy.backends.userspace.entries import (
    Balanced,
    Balancing,
    Listen,
    Listening,
    NodePorts,
    UserspaceSettings,
)
from ebpfproxy.model.address import Address

if TYPE_CHECKING:  # an agent does not need asyncio
    from asyncio.trsock import TransportSocket

LENGTH = struct.Struct("=I")
NAME = "ebpfproxy-relay"
"""The name of a relay process, as `ps` shows it: at most 15 bytes."""
READERS = f"{NAME}-"
"""Each relay answers requests that change nothing also at an abstract unix(7) address: this prefix
and a random part. Such addresses belong to a network namespace, and any user may bind one."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Event(enum.StrEnum):
    """What a relay counts, by name in metrics."""

    ACCEPTED = "tcp_accepted"
    CONNECTED = "tcp_connected"
    RETRIED = "tcp_retried"
    FAILED = "tcp_failed"
    REJECTED = "tcp_rejected"
    RESET = "tcp_reset"
    IDLE = "tcp_idle"
    NOT_ACCEPTED = "tcp_not_accepted"
    FLOWS = "udp_flows"
    FLOWS_EVICTED = "udp_flows_evicted"
    DATAGRAMS_DROPPED = "udp_dropped"

    __hash__ = str.__hash__


class Held(NamedTuple):
    """Entries by key, as pairs, in the order in which they are put."""

    node_ports: list[tuple[NodePorts, tuple[Address, ...]]]
    services: list[tuple[Balanced, Balancing]]
    listeners: list[tuple[Listen, Listening]]


class Failure(NamedTuple):
    """A listener that does not listen: `number` is the errno, `address` the address and port."""

    key: Listen
    number: int
    address: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first request.

    `number`: from 0 on; each relay begins the round robin at another endpoint.
    """

    number: int
    settings: UserspaceSettings


class Change(msgspec.Struct, frozen=True, tag=True):
    """Put these entries, then drop these keys."""

    put: Held
    drop_listeners: list[Listen] = []
    drop_services: list[Balanced] = []


class Read(msgspec.Struct, frozen=True, tag=True):
    """Return the entries that the relay holds, except those of listeners that do not listen."""


class Count(msgspec.Struct, frozen=True, tag=True):
    """Return the counters."""


class ListConnections(msgspec.Struct, frozen=True, tag=True):
    """Return up to `most` connections and UDP flows."""

    most: int


class Find(msgspec.Struct, frozen=True, tag=True):
    """Return the connection or UDP flow of a client to a frontend, if the relay has it. Both are texts with
    ports, as in `Connection`.
    """

    protocol: str
    client: str
    frontend: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Start` and `Change`."""

    failures: list[Failure] = []


class Content(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Read`."""

    held: Held


class Counters(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Count`. `connections` and `udp_flows`: those that are open. `events`: by name."""

    connections: int
    udp_flows: int
    events: dict[str, int]


class Connection(NamedTuple):
    """One relayed connection or UDP flow. Addresses are texts with ports."""

    service: str
    protocol: str
    client: str
    frontend: str
    endpoint: str
    idle: float


class Connections(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ListConnections` and `Find`.

    `dialing`: no endpoint has accepted the connection yet that `Find` describes, and the relay still tries.
    """

    connections: list[Connection]
    dialing: bool = False


Request = Start | Change | Read | Count | ListConnections | Find
Answer = Done | Content | Counters | Connections

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def is_own(peer: "socket.socket | TransportSocket") -> bool:
    """Whether this process's user has connected a Unix socket, or listened at its address."""
    option = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(option)[1] == os.geteuid())


def encode(message: Request | Answer) -> bytes:
    """Return the message with its length."""
    content = _ENCODER.encode(message)
    return LENGTH.pack(len(content)) + content


def decode_request(content: bytes) -> Request:
    """Decode a request, without its length."""
    return _REQUESTS.decode(content)


def ask(control: socket.socket, request: Request) -> Answer:
    """Send a request and wait for its answer. Raises OSError, EOFError at the end of the relay."""
    control.sendall(encode(request))
    (length,) = LENGTH.unpack(_exactly(control, LENGTH.size))
    return _ANSWERS.decode(_exactly(control, length))


def _exactly(control: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = control.recv(min(count - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)
