"""One request and its answer on a raw netlink socket: a dump, one object, or a change that is acknowledged.

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
from collections.abc import Iterator
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
NETLINK_GET_STRICT_CHK = 12

_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: len, type, flags, seq, pid
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: len, type
_ERRNO = struct.Struct("=i")
_U32 = struct.Struct("=I")
_KIND_BITS = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER

RECEIVE_BYTES = 1 << 16
"""More than the 32 KiB to which the kernel fills one datagram of a dump (netlink_dump())."""

ANSWER_SECONDS = 10.0
"""The kernel answers within the system call or at the next one; this is only against waiting for ever."""

DUMP_ATTEMPTS = 10


class Message(NamedTuple):
    """One netlink message. `payload` is what follows the header, padding left out."""

    kind: int
    flags: int
    sequence: int
    payload: bytes


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
                _filter_strictly(sock)
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
    """Send one request and wait for its acknowledgement; `flags`: NLM_F_CREATE and the like.

    Raises OSError with the errno of the answer.
    """
    with _opened(protocol) as sock:
        _send(sock, kind, NLM_F_REQUEST | NLM_F_ACK | flags, body)
        for message in _answer(sock):
            if message.kind == NLMSG_ERROR:
                _raise_if_failed(message.payload)
                return


def get(protocol: int, kind: int, body: bytes) -> list[bytes]:
    """The payloads that answer one request about one object, in the calling thread's network namespace.

    With NLM_F_ECHO, without which net/sched tells a queueing discipline to everybody but the one who asks.

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


def _filter_strictly(sock: socket.socket) -> None:
    try:
        sock.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise


_SEQUENCE = 1  # each socket makes one request


def _send(sock: socket.socket, kind: int, flags: int, body: bytes) -> None:
    sock.sendto(message(kind, flags, _SEQUENCE, body), (0, 0))


def _answer(sock: socket.socket) -> Iterator[Message]:
    """Every message that answers our request, for as long as the caller wants more."""
    while True:
        datagram, _, flags, sender = sock.recvmsg(RECEIVE_BYTES)
        if flags & socket.MSG_TRUNC:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if sender[0] != 0:  # only the kernel has port 0; another process may send to us, too
            continue
        for received in messages(datagram):
            if received.sequence == _SEQUENCE:
                yield received


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
