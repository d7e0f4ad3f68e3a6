"""Transactions of nf_tables, and what a table holds: nfnetlink, without `nft` and its libraries.

Those read all chains and sets of a family before they write one rule, for which the kernel takes time by the
square of their number; and how they word a rule changes from version to version. See
docs/decisions/0015-how-nftables-is-spoken-to.md, with figures.

Everything here acts in the network namespace in which the calling thread is when a `Session` is opened.
Sources: include/uapi/linux/netfilter/nfnetlink.h; net/netfilter/nfnetlink.c for how a batch is answered.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from ebpfproxy.errors import KernelError, NotFound, Rejected, TableFull, Unsupported
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.netlink.netlink import NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, attribute
from ebpfproxy.linux.nft import replies
from ebpfproxy.linux.nft.messages import HEAD, Kind, Operation, Table
from ebpfproxy.linux.nft.replies import ListedChain, ListedSet
from ebpfproxy.linux.nft.sets import SetElement

NETLINK_NETFILTER = 12
SUBSYSTEM = 10 << 8  # NFNL_SUBSYS_NFTABLES, the upper byte of a message's type
_BATCH_BEGIN, _BATCH_END = 16, 17  # NFNL_MSG_BATCH_*

_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_NETLINK_CAP_ACK, _NETLINK_EXT_ACK = 10, 11
_CODE = struct.Struct("=i")  # 0, or the errno with a minus
_ERROR = struct.Struct("=i16x")  # and the header of what was rejected
_REASON = 1  # NLMSGERR_ATTR_MSG
_ROOM_FOR_ERRORS = 64 << 20  # bytes; each rejected message takes about one KiB of it
_SLACK = 1 << 16


class Rejection(NamedTuple):
    """Why the kernel rejected one operation; `reason` is its own wording, where it has one."""

    position: int
    errno: int
    reason: str


class Session:
    """A socket. `commits`: how many transactions were taken.

    Raises Unsupported where the kernel has no nfnetlink, Rejected without file descriptors.
    """

    def __init__(self) -> None:
        with _worded("nf_tables cannot be reached"):
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER
            )
            self._socket.settimeout(netlink.ANSWER_SECONDS)
            self._socket.setsockopt(netlink.SOL_NETLINK, _NETLINK_CAP_ACK, 1)
            self._socket.setsockopt(netlink.SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        self._sequence = 0
        self.commits = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """May be called again."""
        self._socket.close()

    def commit(self, operations: Sequence[Operation]) -> list[Rejection]:
        """All of them in one step, or none: then what the kernel rejects, in their order.

        A packet sees all of it or nothing. It takes the kernel time by the square of how many sets belong to
        new rules: some hundreds of those at a time are best. Without operations nothing is asked.

        Raises Unsupported without nf_tables or CAP_NET_ADMIN, Rejected where the whole is rejected.
        """
        if not operations:
            return []
        with _worded("a change of nftables"):
            self._send(operations)
            found = sorted(self._rejections())
            if found and found[0].position < 0:
                raise OSError(found[0].errno, found[0].reason or os.strerror(found[0].errno))
        self.commits += not found
        return found

    def attempt(self, operations: Sequence[Operation]) -> list[Rejection]:
        """As `commit`, but nothing comes of it, except for what the kernel would reject as it goes along.

        That chains do not fit together is not among it. Raises as `commit`.
        """
        impossible = Operation(Kind.NEW_SET, 0, socket.AF_INET, b"")  # of no table: EINVAL
        found = self.commit([*operations, impossible])
        return [each for each in found if each.position < len(operations)]

    def _send(self, operations: Sequence[Operation]) -> None:
        subsystem = HEAD.pack(socket.AF_UNSPEC, 0, SUBSYSTEM >> 8)
        parts = [netlink.message(_BATCH_BEGIN, NLM_F_REQUEST, 0, subsystem)]
        for number, (kind, flags, family, body) in enumerate(operations, 1):
            head = HEAD.pack(family, 0, 0)
            parts.append(netlink.message(SUBSYSTEM | kind, NLM_F_REQUEST | flags, number, head + body))
        parts.append(netlink.message(_BATCH_END, NLM_F_REQUEST, len(operations) + 1, subsystem))
        batch = b"".join(parts)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, len(batch) + _SLACK)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM_FOR_ERRORS)
        self._socket.sendto(batch, (0, 0))  # all is done when this returns

    def _rejections(self) -> Iterator[Rejection]:
        """All that was answered; where nothing was rejected, that is nothing."""
        self._socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                datagram = self._socket.recv(netlink.RECEIVE_BYTES)
                for each in netlink.messages(datagram):
                    (code,) = _ERROR.unpack_from(each.payload)
                    if each.kind == netlink.NLMSG_ERROR and code:
                        said = dict(netlink.attributes(each.payload, _ERROR.size))
                        yield Rejection(each.sequence - 1, -code, netlink.text(said.get(_REASON)))
        self._socket.settimeout(netlink.ANSWER_SECONDS)

    # --- reading ---

    def generation(self) -> int:
        """A number that changes with every change of any table of the network namespace.

        By a socket that is there already: to close one takes milliseconds after a change, as the kernel
        first finishes what that left to do (nft_rcv_nl_event()).
        """
        with _worded("nf_tables cannot be reached"):
            answer = self._answers(Kind.GET_GENERATION, HEAD.pack(socket.AF_UNSPEC, 0, 0), NLM_F_ACK)
        return int.from_bytes(dict(netlink.attributes(answer[0], HEAD.size))[1]) if answer else 0

    def tables(self) -> list[Table]:
        """Those of IPv4 and of IPv6, of each its own."""
        found = map(replies.table_of, self._dump(Kind.GET_TABLE, socket.AF_UNSPEC))
        return [table for table in found if table]

    def chains(self, table: Table) -> list[ListedChain]:
        """Empty where there is no such table."""
        payloads = self._dump(Kind.GET_CHAIN, table.number)
        return [replies.read_chain(each) for each in payloads if replies.table_of(each) == table]

    def rules(self, table: Table, chain: str) -> list[bytes]:
        """As messages, for `nft_answers.read_rule`.

        One chain at a time, since of a whole table it takes the kernel time by the square of their number.
        """
        body = attribute(1, table.name.encode() + b"\0") + attribute(2, chain.encode() + b"\0")
        return self._dump(Kind.GET_RULE, table.number, body)

    def sets(self, table: Table) -> list[ListedSet]:
        """Empty where there is no such table."""
        body = attribute(1, table.name.encode() + b"\0")
        try:
            return [replies.read_set(each) for each in self._dump(Kind.GET_SET, table.number, body)]
        except NotFound:
            return []

    def elements(self, table: Table, set_name: str) -> list[SetElement]:
        """Raises NotFound where there is no such set."""
        body = attribute(1, table.name.encode() + b"\0") + attribute(2, set_name.encode() + b"\0")
        payloads = self._dump(Kind.GET_ELEMENT, table.number, body)
        return [element for each in payloads for element in replies.read_elements(each)]

    def _dump(self, kind: Kind, family: int, body: bytes = b"") -> list[bytes]:
        for _ in range(netlink.DUMP_ATTEMPTS):
            with _worded("nftables cannot be read"):
                payloads = self._answers(kind, HEAD.pack(family, 0, 0) + body, NLM_F_DUMP)
            if payloads is not None:
                return payloads
        raise Rejected("nftables cannot be read: it changed during each of several attempts")

    def _answers(self, kind: Kind, body: bytes, flags: int) -> list[bytes] | None:
        """The payloads; None where the kernel says that those of a dump do not fit together."""
        self._sequence += 1
        request = netlink.message(SUBSYSTEM | kind, NLM_F_REQUEST | flags, self._sequence, body)
        self._socket.sendto(request, (0, 0))
        payloads: list[bytes] = []
        disturbed = False
        while True:
            for each in netlink.messages(self._socket.recv(netlink.RECEIVE_BYTES)):
                if each.sequence != self._sequence:  # of a dump that failed
                    continue
                disturbed = disturbed or bool(each.flags & NLM_F_DUMP_INTR)
                if each.kind in (netlink.NLMSG_ERROR, netlink.NLMSG_DONE):
                    (code,) = _CODE.unpack_from(each.payload)
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return None if disturbed else payloads
                payloads.append(each.payload)


def failure(what: str, number: int, reason: str = "") -> KernelError:
    """The error of our tree that an errno of nf_tables' stands for."""
    message = f"{what}: {reason or os.strerror(number)}"
    if number in (errno.EPERM, errno.EACCES):
        return Unsupported(message, "run as root, or with CAP_NET_ADMIN")
    if number in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT):
        return Unsupported(message, "ebpfproxy doctor shows what this kernel lacks")
    if number == errno.ENOENT:
        return NotFound(message)
    if number in (errno.ENFILE, errno.ENOSPC):
        return TableFull(message)
    return Rejected(message)


def has_none(error: KernelError) -> bool:
    """Whether it was raised because the kernel has no nf_tables at all."""
    number = getattr(error.__cause__, "errno", None)
    return number in (errno.EINVAL, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP)  # nfnetlink_rcv_msg(), socket(2)


@contextlib.contextmanager
def _worded(what: str) -> Iterator[None]:
    """What fails within, as our error."""
    try:
        yield
    except OSError as error:
        raise failure(what, error.errno or 0, error.strerror or str(error)) from error
