"""Notifications about nf_tables objects, and whether another program changes a table.

The generation number is no substitute: it counts the changes of all programs in all tables, and a CNI plugin
may change its own tables all the time.

Sources: include/uapi/linux/netfilter/nfnetlink.h; nf_tables_rule_notify() and similar functions in
net/netfilter/nf_tables_api.c.
"""

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.netlink.netlink import attributes, text
from ebpfproxy.linux.nft import nft, replies
from ebpfproxy.linux.nft.messages import HEAD, Kind
from ebpfproxy.linux.nft.nft import Session

_GROUP = 7  # NFNLGRP_NFTABLES
_ADD_MEMBERSHIP, _DROP_MEMBERSHIP = 1, 2  # NETLINK_*
_SO_RCVBUFFORCE = 33

_BUFFER_BYTES = 16 << 20
"""For 100 000 changes by other programs between two calls. If it overflows, that counts as a change."""
_FEW_BYTES = 1 << 20  # for several thousand changes between two calls of `Changes.count`
_RULE_CHAIN = 2  # NFTA_RULE_CHAIN
_CHAIN_NAME = 3  # NFTA_CHAIN_NAME


class Notification(NamedTuple):
    """`kind` is a `messages.Kind` or another number; `payload` is for `replies`."""

    kind: int
    payload: bytes


class Notifications:
    """Notifications about the network namespace in which the calling thread is at construction."""

    def __init__(self, buffer_bytes: int) -> None:
        """`buffer_bytes`: for the notifications between two calls of `receive`. Raises KernelError."""
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK,
                socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
                nft.NETLINK_NETFILTER,
            )
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer_bytes)
            self._socket.bind((0, 0))  # a socket without a port receives nothing
        except OSError as error:
            raise _failure(error) from error
        self.listen(True)

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        self._socket.close()

    def listen(self, listen: bool) -> None:
        """Start or stop listening. Notifications in between are never received. Raises KernelError."""
        option = _ADD_MEMBERSHIP if listen else _DROP_MEMBERSHIP
        try:
            self._socket.setsockopt(netlink.SOL_NETLINK, option, _GROUP)
        except OSError as error:
            raise _failure(error) from error

    def receive(self) -> Iterator[Notification | None]:
        """The notifications since the last call. None means that any number of them were lost.

        It takes 2 µs, and 2 µs for each notification. Raises KernelError.
        """
        while True:
            try:
                datagram, _, flags, sender = self._socket.recvmsg(netlink.RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise _failure(error) from error
                yield None
                continue
            if sender[0] != 0:  # only the kernel has port 0
                continue
            if flags & socket.MSG_TRUNC:
                yield None
            for each in netlink.messages(datagram):
                yield Notification(each.kind & ~nft.SUBSYSTEM, each.payload)


class TableWatch:
    """Detects changes of tables by other programs, in the calling thread's network namespace at construction.

    It does not listen during changes by this process. If the generation number grows by more than the number
    of its own transactions meanwhile, another program has made a change.
    """

    def __init__(self, name: str) -> None:
        """`name` of the tables, of IPv4 and of IPv6. Raises KernelError."""
        self._name = name
        self._disturbed = False
        self._notifications = Notifications(_BUFFER_BYTES)

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._notifications.close()

    def is_disturbed(self) -> bool:
        """Whether another program has made a change since `settle`. Raises KernelError."""
        for each in self._notifications.receive():
            self._disturbed = self._disturbed or each is None or self._concerns(each)
        return self._disturbed

    def settle(self) -> None:
        """Forget all changes so far. Call it before you read the tables. Raises KernelError."""
        self.is_disturbed()
        self._disturbed = False

    @contextlib.contextmanager
    def own_change(self, session: Session) -> Iterator[None]:
        """Ignore what this session commits within the block."""
        self.is_disturbed()
        generation, commits = session.generation(), session.commits
        self._notifications.listen(False)
        try:
            yield
        finally:
            self._notifications.listen(True)
            if not 0 <= session.generation() - generation <= session.commits - commits:
                self._disturbed = True

    def _concerns(self, notification: Notification) -> bool:
        table = replies.table_of(notification.payload)
        return table is not None and table.name == self._name


class Changes:
    """Counts changes of chains of iptables-nft since its creation, in both families.

    `concerns` returns whether a chain counts, given its table and name. A deleted table always counts, and so
    does a rule that is deleted from any chain of `tables`, including the built-in chains.
    """

    def __init__(self, tables: frozenset[str], concerns: Callable[[str, str], bool]) -> None:
        """Count in the calling thread's network namespace. Raises KernelError."""
        self._tables = tables
        self._concerns = concerns
        self._count = 0
        self._notifications = Notifications(_FEW_BYTES)

    def count(self) -> int:
        """The number of changes. Lost notifications, after too many at a time, count as one change.

        It takes microseconds for each change of nf_tables since the last call, up to some thousands.
        Raises KernelError.
        """
        for each in self._notifications.receive():
            self._count += each is None or self._counts(each)
        return self._count

    def close(self) -> None:
        """Stop counting; a second call does nothing."""
        self._notifications.close()

    def _counts(self, notification: Notification) -> bool:
        table = replies.table_of(notification.payload)
        if table is None or table.name not in self._tables:
            return False
        if notification.kind in (Kind.DELETE_TABLE, Kind.DELETE_RULE):
            return True
        found = dict(attributes(notification.payload, HEAD.size))
        if notification.kind in (Kind.NEW_CHAIN, Kind.DELETE_CHAIN):
            return self._concerns(table.name, text(found.get(_CHAIN_NAME)))
        return notification.kind == Kind.NEW_RULE and self._concerns(table.name, text(found.get(_RULE_CHAIN)))


def _failure(error: OSError) -> KernelError:
    return nft.failure("cannot listen to changes of nftables", error.errno or 0)
