"""Raw netlink sockets: dump a table, get one object, request changes.

This module reads all tables, and changes those that may have thousands of entries, in batches. Single links,
addresses and tc filters are changed with pyroute2 (`iproute`). The measurements that decided which of them
does what: docs/decisions/0091-one-netlink-stack.md.

All functions raise OSError with the kernel's errno. The callers convert it to an error of ebpfproxy.errors.
Sources: Documentation/userspace-api/netlink/intro.rst; include/uapi/linux/netlink.h.
"""

import contextlib
import errno
import math
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ebpfproxy.errors import Rejected

NLM_F_REQUEST = 0x1
NLM_F_ACK = 0x4
NLM_F_ECHO = 0x8
NLM_F_DUMP_INTR = 0x10
NLM_F_DUMP = 0x300
NLM_F_EXCL = 0x200
NLM_F_CREATE = 0x400

NLMSG_ERROR = 2
NLMSG_DONE = 3
NLMSG_MIN_TYPE = 0x10

SOL_NETLINK = 270
NETLINK_CAP_ACK, NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK = 10, 11, 12

_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: len, type, flags, seq, pid
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: len, type
_ERRNO = struct.Struct("=i")
_NLMSGERR_SIZE = _ERRNO.size + _HEADER.size  # struct nlmsgerr; attributes follow
_NLM_F_CAPPED = 0x100  # the error message does not repeat the body of the request
_REASON = 1  # NLMSGERR_ATTR_MSG
_U32 = struct.Struct("=I")
_KIND_BITS = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER

RECEIVE_BYTES = 1 << 16
"""More than the 32 KiB to which the kernel fills one datagram of a dump (netlink_dump())."""

ANSWER_SECONDS = 10.0
"""Timeout of a receive. It should never expire: the kernel replies during sendto() or the next recvmsg()."""

DUMP_ATTEMPTS = 10

_limits = threading.local()

_BATCH_MESSAGES = 64
"""Messages in one datagram. Each error takes 1 KiB of memory, and all must fit the default receive buffer."""

_BATCH_BYTES = 1 << 16
"""Less than the default send buffer."""


class Message(NamedTuple):
    """One netlink message. `payload` is what follows the header, without padding."""

    kind: int
    flags: int
    sequence: int
    payload: bytes


class Request(NamedTuple):
    """One request of a batch: message type, flags (such as NLM_F_CREATE), and what follows the header."""

    kind: int
    flags: int
    body: bytes


class Rejection(NamedTuple):
    """Why the kernel rejected a request. Some subsystems use their own numbers for `errno`. `reason` is the
    kernel's text if it sent one, else the text of the errno."""

    errno: int
    reason: str


Values = Mapping[int, "bytes | int | str | Values | None"]
"""Attributes by their type: see `encoded`."""


@contextlib.contextmanager
def rejecting(action: str) -> Iterator[None]:
    """Raise an OSError of the block as Rejected. `action` starts its message: "cannot ..."."""
    try:
        yield
    except OSError as error:
        raise Rejected(f"{action}: {error.strerror or error}") from error


def dump(protocol: int, kind: int, body: bytes, strict: bool = False) -> list[bytes]:
    """The payloads of all messages of one consistent dump, in the calling thread's network namespace.

    `protocol` is NETLINK_*, `kind` the message type, `body` what follows the header. With `strict` the kernel
    filters by the fields of the body (NETLINK_GET_STRICT_CHK, since 4.20; ignored before).
    A dump during which the table changed (NLM_F_DUMP_INTR) or the buffer overflowed (ENOBUFS) is repeated.

    Raises OSError: the kernel's errno, EAGAIN if all `DUMP_ATTEMPTS` dumps were interrupted, or E2BIG if it
    has more messages than `at_most` allows.
    """
    for _ in range(DUMP_ATTEMPTS):
        with _opened(protocol) as sock:  # a new socket each time discards the rest of an interrupted dump
            if strict:
                _enable(sock, NETLINK_GET_STRICT_CHK)
            _send(sock, kind, NLM_F_REQUEST | NLM_F_DUMP, body)
            try:
                payloads = _complete_dump(sock)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                continue
            if payloads is not None:
                return payloads
    raise OSError(errno.EAGAIN, f"the table changed during each of {DUMP_ATTEMPTS} dumps")


@contextlib.contextmanager
def at_most(messages: int) -> Iterator[None]:
    """Limit the dumps of the calling thread in this block.

    For tables that a tenant can fill: a container may have CAP_NET_ADMIN in its network namespace.
    """
    _limits.messages = messages
    try:
        yield
    finally:
        del _limits.messages


def change(protocol: int, kind: int, body: bytes, flags: int = 0) -> None:
    """Send one request and wait for its acknowledgment. `flags`: such as NLM_F_CREATE.

    Raises OSError with the errno of the reply.
    """
    with _opened(protocol) as sock:
        _send(sock, kind, NLM_F_REQUEST | NLM_F_ACK | flags, body)
        for message in _replies(sock):
            if message.kind == NLMSG_ERROR:
                _raise_if_failed(message.payload)
                return


def changes(protocol: int, requests: Sequence[Request]) -> dict[int, Rejection]:
    """Send many requests; return the rejected ones by their position.

    The kernel accepts or rejects each request independently, in their order. All are finished when this
    function returns. The kernel replies only to rejected requests and to the last one of each datagram.
    Without requests nothing is sent.

    Raises OSError if the socket fails.
    """
    if not requests:
        return {}
    rejected: dict[int, Rejection] = {}
    with _opened(protocol) as sock:
        _enable(sock, NETLINK_CAP_ACK)
        _enable(sock, NETLINK_EXT_ACK)
        for datagram, last in _datagrams(requests):
            sock.sendto(datagram, (0, 0))
            for reply in _received(sock):
                if reply.kind == NLMSG_ERROR:
                    rejection = _rejection(reply)
                    if rejection:
                        rejected[reply.sequence] = rejection
                    if reply.sequence == last:
                        break
    return rejected


def get(protocol: int, kind: int, body: bytes) -> list[bytes]:
    """The payloads of the reply to a request for one object, in the calling thread's network namespace.

    The request has NLM_F_ECHO. Without it, net/sched reports a qdisc to all listeners except the requester.

    Raises OSError with the errno of the reply.
    """
    payloads: list[bytes] = []
    with _opened(protocol) as sock:
        _send(sock, kind, NLM_F_REQUEST | NLM_F_ACK | NLM_F_ECHO, body)
        for received in _replies(sock):
            if received.kind == NLMSG_ERROR:
                _raise_if_failed(received.payload)
                break
            payloads.append(received.payload)
    return payloads


def message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """One message to the kernel, with its header."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body


def messages(datagram: bytes) -> Iterator[Message]:
    """The messages of one datagram, without a truncated last one."""
    offset = 0
    while offset + _HEADER.size <= len(datagram):
        length, kind, flags, sequence, _ = _HEADER.unpack_from(datagram, offset)
        if length < _HEADER.size or offset + length > len(datagram):
            return
        yield Message(kind, flags, sequence, datagram[offset + _HEADER.size : offset + length])
        offset += _aligned(length)


def attribute(kind: int, value: bytes) -> bytes:
    """One struct nlattr, padded to four bytes."""
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + bytes(_aligned(length) - length)


def encoded(values: Values) -> bytes:
    """Attributes: bytes as they are, a number as u32 in host order, text with a terminating zero. Without
    those that are None."""
    return b"".join(attribute(kind, _value(each)) for kind, each in values.items() if each is not None)


def _value(value: "bytes | int | str | Values") -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int):
        return _U32.pack(value)
    return value.encode() + b"\0" if isinstance(value, str) else encoded(value)


def attributes(payload: bytes, offset: int) -> list[tuple[int, bytes]]:
    """Type and value of each attribute of `payload` from `offset` on. Stops at the first malformed one."""
    found = []
    while offset + _ATTRIBUTE.size <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, offset)
        if length < _ATTRIBUTE.size or offset + length > len(payload):
            break
        found.append((kind & _KIND_BITS, payload[offset + _ATTRIBUTE.size : offset + length]))
        offset += (length + 3) & ~3  # a call of _aligned() takes a third of the time
    return found


def text(value: bytes | None) -> str:
    """The value of a string attribute, without its terminating zero; "" if the attribute is missing."""
    return (value or b"").rstrip(b"\0").decode(errors="replace")


def number(value: bytes | None) -> int:
    """The value of a u32 attribute; 0 if the attribute is missing or too short."""
    return int(_U32.unpack_from(value)[0]) if value and len(value) >= _U32.size else 0


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _opened(protocol: int) -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    sock.settimeout(ANSWER_SECONDS)
    return sock


def _enable(sock: socket.socket, option: int) -> None:
    """Set an option if the kernel has it. CAP_ACK: since 4.2. EXT_ACK: 4.12. GET_STRICT_CHK: 4.20."""
    try:
        sock.setsockopt(SOL_NETLINK, option, 1)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise


_SEQUENCE = 1  # except in `changes`, a socket sends only one request


def _datagrams(requests: Sequence[Request]) -> Iterator[tuple[bytes, int]]:
    """The datagrams, each with the position of its last request, the only one that requests a reply."""
    parts: list[bytes] = []
    size = 0
    for position, (kind, flags, body) in enumerate(requests):
        next_size = len(requests[position + 1].body) if position + 1 < len(requests) else _BATCH_BYTES
        size += _HEADER.size + len(body)
        full = len(parts) + 1 == _BATCH_MESSAGES or size + _HEADER.size + next_size > _BATCH_BYTES
        flags |= NLM_F_REQUEST | (NLM_F_ACK if full else 0)
        parts.append(message(kind, flags, position, body))
        if full:
            yield b"".join(parts), position
            parts.clear()
            size = 0


def _rejection(reply: Message) -> Rejection | None:
    """The rejection in an NLMSG_ERROR; None if it is an acknowledgment."""
    (code,) = _ERRNO.unpack_from(reply.payload)
    if not code:
        return None
    details = dict(attributes(reply.payload, _NLMSGERR_SIZE)) if reply.flags & _NLM_F_CAPPED else {}
    return Rejection(-code, text(details.get(_REASON)) or os.strerror(-code))


def _send(sock: socket.socket, kind: int, flags: int, body: bytes) -> None:
    sock.sendto(message(kind, flags, _SEQUENCE, body), (0, 0))


def _replies(sock: socket.socket) -> Iterator[Message]:
    """The replies to the request with _SEQUENCE, without an end: the caller stops the iteration."""
    return (received for received in _received(sock) if received.sequence == _SEQUENCE)


def _received(sock: socket.socket) -> Iterator[Message]:
    """The messages from the kernel, without an end: the caller stops the iteration."""
    while True:
        datagram, _, flags, sender = sock.recvmsg(RECEIVE_BYTES)
        if flags & socket.MSG_TRUNC:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if sender[0] != 0:  # only the kernel has port 0; other processes can send to this socket, too
            continue
        yield from messages(datagram)


def _complete_dump(sock: socket.socket) -> list[bytes] | None:
    """The payloads up to NLMSG_DONE; None if the kernel reports that the dump is inconsistent."""
    payloads: list[bytes] = []
    interrupted = False
    most = getattr(_limits, "messages", math.inf)
    for received in _replies(sock):
        interrupted = interrupted or bool(received.flags & NLM_F_DUMP_INTR)
        if received.kind in (NLMSG_DONE, NLMSG_ERROR):
            _raise_if_failed(received.payload)
            break
        if received.kind >= NLMSG_MIN_TYPE:
            payloads.append(received.payload)
            if len(payloads) > most:
                raise OSError(errno.E2BIG, f"more than {most} objects")
    return None if interrupted else payloads


def _raise_if_failed(payload: bytes) -> None:
    """NLMSG_ERROR and NLMSG_DONE start with a negative errno, or with 0 or nothing on success."""
    code = _ERRNO.unpack_from(payload)[0] if len(payload) >= _ERRNO.size else 0
    if code < 0:
        raise OSError(-code, os.strerror(-code))
