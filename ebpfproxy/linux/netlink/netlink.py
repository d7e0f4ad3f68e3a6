"""Requests and answers on a raw netlink socket: a dump, one object, or changes.

pyroute2 is for links and tc, where there is much to encode and little to read. Tables that are read
again and again and may be long (the local routes of a node with IPVS, the sockets of a node) are
read here: pyroute2 0.9 decodes about 6 000 routes a second, these few lines 200 000 (measured).

Errors leave as OSError with the kernel's errno; the module that knows the request words them.
Sources: Documentation/userspace-api/netlink/intro.rst; include/uapi/linux/netlink.h.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
_REFUSED = _ERRNO.size + _HEADER.size  # struct nlmsgerr; behind it attributes
_NLM_F_CAPPED = 0x100  # it does: what was rejected is not sent back
_REASON = 1  # NLMSGERR_ATTR_MSG
_U32 = struct.Struct("=I")
_KIND_BITS = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER

RECEIVE_BYTES = 1 << 16
"""More than the 32 KiB to which the kernel fills one datagram of a dump (netlink_dump())."""

ANSWER_SECONDS = 10.0
"""The kernel answers within the system call or at the next one; this is only against waiting for ever."""

DUMP_ATTEMPTS = 10

_AT_ONCE = 64
"""Messages in one datagram: their errors, a KiB of memory each, have to fit the usual receive buffer."""

_AT_ONCE_BYTES = 1 << 16
"""Less than the usual send buffer."""


class Message(NamedTuple):
    """One netlink message. `payload` is what follows the header, padding left out."""

    kind: int
    flags: int
    sequence: int
    payload: bytes


class Request(NamedTuple):
    """One change of several: its type, NLM_F_CREATE and the like, and what follows the header."""

    kind: int
    flags: int
    body: bytes


class Rejection(NamedTuple):
    """Why the kernel rejected a request. `errno` may be a number of the subsystem's own; `reason` is the
    kernel's wording, or that of the errno."""

    errno: int
    reason: str


def dump(protocol: int, kind: int, body: bytes, strict: bool = False) -> list[bytes]:
    """The payloads of every message of one whole dump, in the calling thread's network namespace.

    `protocol` is NETLINK_*, `kind` the message's type, `body` what follows the header. With `strict` the
    kernel filters routes by what the body says (NETLINK_GET_STRICT_CHK, since 4.20; ignored before).
    A dump in which the kernel saw a change (NLM_F_DUMP_INTR) or ran out of room (ENOBUFS) is repeated.

    Raises OSError: the kernel's errno, or EAGAIN where `DUMP_ATTEMPTS` were all disturbed.
    """
    for _ in range(DUMP_ATTEMPTS):
        with _opened(protocol) as sock:  # a new one each time: the rest of a broken dump is gone with it
            if strict:
                _wish(sock, NETLINK_GET_STRICT_CHK)
            _send(sock, kind, NLM_F_REQUEST | NLM_F_DUMP, body)
            try:
                payloads = _whole_dump(sock)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                continue
            if payloads is not None:
                return payloads
    raise OSError(errno.EAGAIN, "the table changed during each of the dumps")


def change(protocol: int, kind: int, body: bytes, flags: int = 0) -> None:
    """Send one request and wait for its acknowledgment; `flags`: NLM_F_CREATE and the like.

    Raises OSError with the errno of the answer.
    """
    with _opened(protocol) as sock:
        _send(sock, kind, NLM_F_REQUEST | NLM_F_ACK | flags, body)
        for message in _answer(sock):
            if message.kind == NLMSG_ERROR:
                _raise_if_failed(message.payload)
                return


def changes(protocol: int, requests: Sequence[Request]) -> dict[int, Rejection]:
    """Send many requests, of which each is taken or rejected on its own; the rejected ones, by position.

    They are carried out in their order, and all are when this returns. Only what is rejected is answered, and
    the last of each datagram. Without requests nothing is asked.

    Raises OSError where the socket fails.
    """
    if not requests:
        return {}
    rejected: dict[int, Rejection] = {}
    with _opened(protocol) as sock:
        _wish(sock, NETLINK_CAP_ACK)
        _wish(sock, NETLINK_EXT_ACK)
        for datagram, last in _datagrams(requests):
            sock.sendto(datagram, (0, 0))
            for answer in _received(sock):
                if answer.kind == NLMSG_ERROR:
                    why = _rejected(answer)
                    if why:
                        rejected[answer.sequence] = why
                    if answer.sequence == last:
                        break
    return rejected


def get(protocol: int, kind: int, body: bytes) -> list[bytes]:
    """The payloads that answer one request about one object, in the calling thread's network namespace.

    With NLM_F_ECHO, without which net/sched reports a queueing discipline to all but the requester.

    Raises OSError with the errno of the answer.
    """
    payloads: list[bytes] = []
    with _opened(protocol) as sock:
        _send(sock, kind, NLM_F_REQUEST | NLM_F_ACK | NLM_F_ECHO, body)
        for received in _answer(sock):
            if received.kind == NLMSG_ERROR:
                _raise_if_failed(received.payload)
                break
            payloads.append(received.payload)
    return payloads


def message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """One message to the kernel, header included."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body


def messages(datagram: bytes) -> Iterator[Message]:
    """The messages of one datagram; a last one that is cut short is left out."""
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


def attributes(payload: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """Type and value of each attribute of `payload` from `offset` on; ends at the first malformed one."""
    while offset + _ATTRIBUTE.size <= len(payload):
        length, kind = _ATTRIBUTE.unpack_from(payload, offset)
        if length < _ATTRIBUTE.size or offset + length > len(payload):
            return
        yield kind & _KIND_BITS, payload[offset + _ATTRIBUTE.size : offset + length]
        offset += _aligned(length)


def text(value: bytes | None) -> str:
    """A value that is a string, its terminating zero left out; "" where the attribute is missing."""
    return (value or b"").rstrip(b"\0").decode(errors="replace")


def number(value: bytes | None) -> int:
    """A value that is a u32; 0 where the attribute is missing, or too short."""
    return int(_U32.unpack_from(value)[0]) if value and len(value) >= _U32.size else 0


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _opened(protocol: int) -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    sock.settimeout(ANSWER_SECONDS)
    return sock


def _wish(sock: socket.socket, option: int) -> None:
    """Turn it on where the kernel has it: since 4.2 CAP_ACK, 4.12 EXT_ACK, 4.20 GET_STRICT_CHK."""
    try:
        sock.setsockopt(SOL_NETLINK, option, 1)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise


_SEQUENCE = 1  # each socket makes one request


def _datagrams(requests: Sequence[Request]) -> Iterator[tuple[bytes, int]]:
    """Each with the position of its last request, which is the only one that asks for an answer anyway."""
    parts: list[bytes] = []
    size = 0
    for position, (kind, flags, body) in enumerate(requests):
        following = len(requests[position + 1].body) if position + 1 < len(requests) else _AT_ONCE_BYTES
        size += _HEADER.size + len(body)
        full = len(parts) + 1 == _AT_ONCE or size + _HEADER.size + following > _AT_ONCE_BYTES
        flags |= NLM_F_REQUEST | (NLM_F_ACK if full else 0)
        parts.append(message(kind, flags, position, body))
        if full:
            yield b"".join(parts), position
            parts.clear()
            size = 0


def _rejected(answer: Message) -> Rejection | None:
    """None where it says that all went well."""
    (code,) = _ERRNO.unpack_from(answer.payload)
    if not code:
        return None
    reported = dict(attributes(answer.payload, _REFUSED)) if answer.flags & _NLM_F_CAPPED else {}
    return Rejection(-code, text(reported.get(_REASON)) or os.strerror(-code))


def _send(sock: socket.socket, kind: int, flags: int, body: bytes) -> None:
    sock.sendto(message(kind, flags, _SEQUENCE, body), (0, 0))


def _answer(sock: socket.socket) -> Iterator[Message]:
    """Every message that answers our request, for as long as the caller wants more."""
    return (received for received in _received(sock) if received.sequence == _SEQUENCE)


def _received(sock: socket.socket) -> Iterator[Message]:
    """Every message of the kernel's, for as long as the caller wants more."""
    while True:
        datagram, _, flags, sender = sock.recvmsg(RECEIVE_BYTES)
        if flags & socket.MSG_TRUNC:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if sender[0] != 0:  # only the kernel has port 0; another process may send to us, too
            continue
        yield from messages(datagram)


def _whole_dump(sock: socket.socket) -> list[bytes] | None:
    """The payloads up to NLMSG_DONE; None where the kernel says that they do not fit together."""
    payloads: list[bytes] = []
    interrupted = False
    for received in _answer(sock):
        interrupted = interrupted or bool(received.flags & NLM_F_DUMP_INTR)
        if received.kind in (NLMSG_DONE, NLMSG_ERROR):
            _raise_if_failed(received.payload)
            break
        if received.kind >= NLMSG_MIN_TYPE:
            payloads.append(received.payload)
    return None if interrupted else payloads


def _raise_if_failed(payload: bytes) -> None:
    """NLMSG_ERROR and NLMSG_DONE begin with a negative errno, or with 0 (or nothing) for success."""
    code = _ERRNO.unpack_from(payload)[0] if len(payload) >= _ERRNO.size else 0
    if code < 0:
        raise OSError(-code, os.strerror(-code))
