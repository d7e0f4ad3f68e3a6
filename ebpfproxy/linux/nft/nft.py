"""Commits transactions of nf_tables and reads tables through nfnetlink, without nft(8) and its libraries.

nft and its libraries read all chains and sets of a family before they write a rule. That takes time
quadratic in their number. The text of rules also changes between versions of nft. See
docs/decisions/0091-one-netlink-stack.md for measurements.

A `Session` acts in the network namespace in which the calling thread is when it is created.
Sources: include/uapi/linux/netfilter/nfnetlink.h; net/netfilter/nfnetlink.c for the replies to a batch.
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
from ebpfproxy.linux.netlink.netlink import NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST
from ebpfproxy.linux.nft import replies
from ebpfproxy.linux.nft.encoding import name
from ebpfproxy.linux.nft.flowtables import ListedFlowtable, read_flowtable
from ebpfproxy.linux.nft.messages import HEAD, Kind, Operation, Table
from ebpfproxy.linux.nft.replies import ListedChain, ListedRule, ListedSet
from ebpfproxy.linux.nft.sets import SetElement

NETLINK_NETFILTER = 12
SUBSYSTEM = 10 << 8  # NFNL_SUBSYS_NFTABLES, the upper byte of a message's type
_BATCH_BEGIN, _BATCH_END = 16, 17  # NFNL_MSG_BATCH_*

_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_NETLINK_CAP_ACK, _NETLINK_EXT_ACK = 10, 11
_CODE = struct.Struct("=i")  # 0, or the negative errno
_ERROR = struct.Struct("=i16x")  # followed by the header of the rejected message
_REASON = 1  # NLMSGERR_ATTR_MSG
_ERROR_BUFFER_BYTES = 64 << 20  # each rejected message takes about one KiB of it
_SLACK = 1 << 16


class Rejection(NamedTuple):
    """Why the kernel rejected one operation. `reason` is the kernel's text, "" if it sent none."""

    position: int
    errno: int
    reason: str


class Session:
    """A netlink socket for transactions and reads. `commits`: the number of accepted transactions.

    Raises Unsupported if the kernel has no nfnetlink, Rejected if no file descriptor is free.
    """

    def __init__(self) -> None:
        with _converted("cannot access nf_tables"):
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER
            )
            self._socket.settimeout(netlink.ANSWER_SECONDS)
            self._socket.setsockopt(netlink.SOL_NETLINK, _NETLINK_CAP_ACK, 1)
            self._socket.setsockopt(netlink.SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        self._sequence = 0
        self._has_replies = False  # whether a request failed before all of its replies were received
        self.commits = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._socket.close()

    def commit(self, operations: Sequence[Operation]) -> list[Rejection]:
        """Apply all operations atomically, or none. Return the rejected ones, in their order.

        A packet sees either all changes or none. The kernel takes time quadratic in the number of new
        anonymous sets, so pass some hundreds of them at a time. Without operations nothing is sent.

        Raises Unsupported without nf_tables or CAP_NET_ADMIN, Rejected if the transaction itself is rejected.
        """
        if not operations:
            return []
        with _converted("cannot change nftables"):
            self._discard()
            self._has_replies = True
            self._send(operations)
            found = sorted(self._rejections())
            self._has_replies = False
            if found and found[0].position < 0:
                raise OSError(found[0].errno, found[0].reason or os.strerror(found[0].errno))
        self.commits += not found
        return found

    def attempt(self, operations: Sequence[Operation]) -> list[Rejection]:
        """Return what `commit` would reject, without applying anything. Raises the errors of `commit`.

        It does not find errors in the way chains refer to each other, which the kernel checks last.
        """
        invalid = Operation(Kind.NEW_SET, 0, socket.AF_INET, b"")  # without a table: EINVAL
        found = self.commit([*operations, invalid])
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
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ERROR_BUFFER_BYTES)
        self._socket.sendto(batch, (0, 0))  # the kernel has processed the batch when this returns

    def _rejections(self) -> Iterator[Rejection]:
        """The pending replies. The kernel replies only to rejected messages."""
        for datagram in self._pending():
            for each in netlink.messages(datagram):
                (code,) = _ERROR.unpack_from(each.payload)
                if each.kind == netlink.NLMSG_ERROR and code:
                    details = dict(netlink.attributes(each.payload, _ERROR.size))
                    yield Rejection(each.sequence - 1, -code, netlink.text(details.get(_REASON)))

    def _discard(self) -> None:
        """Receive the rest of the replies to a request that failed. They are no replies to the next one, and
        the kernel rejects a dump (EBUSY) until the previous one has ended (netlink_dump_start())."""
        while self._has_replies:
            try:
                for _ in self._pending():
                    pass
            except OSError as error:
                if error.errno != errno.ENOBUFS:  # replies were lost, which is right
                    raise
            else:
                self._has_replies = False

    def _pending(self) -> Iterator[bytes]:
        """The datagrams that have arrived. A dump continues as they are received."""
        self._socket.settimeout(0)
        try:
            while True:
                yield self._socket.recv(netlink.RECEIVE_BYTES)
        except BlockingIOError:
            pass
        finally:
            self._socket.settimeout(netlink.ANSWER_SECONDS)

    # --- reading ---

    def generation(self) -> int:
        """The generation number, which every change of any table of the network namespace increments.

        It uses the session's socket: closing a socket takes milliseconds after a change, because the kernel
        first finishes deferred work (nft_rcv_nl_event()).
        """
        with _converted("cannot access nf_tables"):
            payloads = self._payloads(Kind.GET_GENERATION, HEAD.pack(socket.AF_UNSPEC, 0, 0), NLM_F_ACK)
        return int.from_bytes(dict(netlink.attributes(payloads[0], HEAD.size))[1]) if payloads else 0

    def tables(self) -> list[Table]:
        """All tables of the families ip and ip6."""
        found = map(replies.table_of, self._dump(Kind.GET_TABLE, socket.AF_UNSPEC))
        return [table for table in found if table]

    def table_names(self) -> frozenset[str]:
        """The names of the tables of all families."""
        return frozenset(map(replies.table_name, self._dump(Kind.GET_TABLE, socket.AF_UNSPEC)))

    def chains(self, table: Table) -> list[ListedChain]:
        """The chains of a table; empty if the table does not exist."""
        payloads = self._dump(Kind.GET_CHAIN, table.number)
        return [replies.read_chain(each) for each in payloads if replies.table_of(each) == table]

    def rules(self, table: Table) -> Iterator[ListedRule]:
        """The rules of a table, in the order of each chain; empty if the table does not exist.

        The kernel takes time quadratic in their number, with a small factor: 0.12 s for 20,000.
        """
        return map(replies.read_rule, self._dump(Kind.GET_RULE, table.number, _named(table)))

    def packets(self, table: Table, chain: str) -> int:
        """The packets that the rules of a chain have counted; 0 if the chain does not exist."""
        payloads = self._dump(Kind.GET_RULE, table.number, _named(table, chain))
        return sum(map(replies.counted_packets, payloads))

    def sets(self, table: Table) -> list[ListedSet]:
        """The sets of a table; empty if the table does not exist."""
        try:
            return [replies.read_set(each) for each in self._dump(Kind.GET_SET, table.number, _named(table))]
        except NotFound:
            return []

    def flowtables(self, table: Table) -> list[ListedFlowtable]:
        """The flowtables of a table; empty if the table does not exist."""
        payloads = self._dump(Kind.GET_FLOWTABLE, table.number)
        return [read_flowtable(each) for each in payloads if replies.table_of(each) == table]

    def elements(self, table: Table, set_name: str) -> list[SetElement]:
        """The elements of a set. Raises NotFound if it does not exist."""
        payloads = self._dump(Kind.GET_ELEMENT, table.number, _named(table, set_name))
        return [element for each in payloads for element in replies.read_elements(each)]

    def listed(self, table: Table, set_name: str, address_bytes: int) -> Iterator[tuple[bytes, int, bytes]]:
        """The elements of a map of lists of endpoints; see `replies.read_listed`. Raises NotFound."""
        for each in self._dump(Kind.GET_ELEMENT, table.number, _named(table, set_name)):
            yield from replies.read_listed(each, address_bytes)

    def dump(self, kind: Kind) -> list[bytes]:
        """The payloads of all objects of this kind, of all families."""
        return self._dump(kind, socket.AF_UNSPEC)

    def _dump(self, kind: Kind, family: int, body: bytes = b"") -> list[bytes]:
        for _ in range(netlink.DUMP_ATTEMPTS):
            with _converted("cannot read nftables"):
                payloads = self._payloads(kind, HEAD.pack(family, 0, 0) + body, NLM_F_DUMP)
            if payloads is not None:
                return payloads
        raise Rejected(f"cannot read nftables: it changed during each of {netlink.DUMP_ATTEMPTS} attempts")

    def _payloads(self, kind: Kind, body: bytes, flags: int) -> list[bytes] | None:
        """The payloads of the reply; None if the kernel reports that a dump is inconsistent."""
        self._discard()
        self._has_replies = True
        self._sequence += 1
        request = netlink.message(SUBSYSTEM | kind, NLM_F_REQUEST | flags, self._sequence, body)
        self._socket.sendto(request, (0, 0))
        payloads: list[bytes] = []
        interrupted = False
        while True:
            for each in netlink.messages(self._socket.recv(netlink.RECEIVE_BYTES)):
                interrupted = interrupted or bool(each.flags & NLM_F_DUMP_INTR)
                if each.kind in (netlink.NLMSG_ERROR, netlink.NLMSG_DONE):
                    (code,) = _CODE.unpack_from(each.payload)
                    self._has_replies = False
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return None if interrupted else payloads
                payloads.append(each.payload)


def _named(*names: Table | str) -> bytes:
    """The first attributes of a request: the names of the table and of an object in it."""
    return b"".join(
        name(kind, each.name if isinstance(each, Table) else each) for kind, each in enumerate(names, 1)
    )


def failure(action: str, number: int, reason: str = "") -> KernelError:
    """The error of ebpfproxy.errors for an errno of nf_tables. `action`: "cannot ..."."""
    message = f"{action}: {reason or os.strerror(number)}"
    if number in (errno.EPERM, errno.EACCES):
        return Unsupported(message, "run as root, or with CAP_NET_ADMIN")
    if number in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT):
        return Unsupported(message, "run `ebpfproxy doctor`, which shows what this kernel lacks")
    if number == errno.ENOENT:
        return NotFound(message)
    if number in (errno.ENFILE, errno.ENOSPC):
        return TableFull(message)
    return Rejected(message)


def has_none(error: KernelError) -> bool:
    """Whether an error was raised because the kernel has no nf_tables."""
    number = getattr(error.__cause__, "errno", None)
    return number in (errno.EINVAL, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP)  # nfnetlink_rcv_msg(), socket(2)


@contextlib.contextmanager
def _converted(action: str) -> Iterator[None]:
    """Convert an OSError within the block to an error of ebpfproxy.errors."""
    try:
        yield
    except OSError as error:
        raise failure(action, error.errno or 0, error.strerror or str(error)) from error
