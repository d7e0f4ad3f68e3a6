"""Whether somebody else changes the tables of a name: told by the kernel as it happens.

The kernel numbers its generations, but counts everybody's changes in every table, and a CNI plugin may have
its own changed all the time. So this listens to what is changed. What we change ourselves is not listened to:
that we made so many changes, and the generation went on by as many, says that nobody else was there.
"""

import contextlib
import errno
import socket
from collections.abc import Iterator

from ebpfproxy.kernel import netlink, nft, nft_answers
from ebpfproxy.kernel.nft import Session
from ebpfproxy.kernel.nft_messages import Kind

_GROUP = 7  # NFNLGRP_NFTABLES
_ADD_MEMBERSHIP, _DROP_MEMBERSHIP = 1, 2  # NETLINK_*
_SO_RCVBUFFORCE = 33
_ROOM = 16 << 20
"""Bytes, for 100 000 changes of others between two looks; where that is too little, it counts as a change."""


class TableWatch:
    """In the network namespace in which the calling thread is when it is made. Raises KernelError."""

    def __init__(self, name: str) -> None:
        """`name` of the tables, of IPv4 and of IPv6."""
        self._name = name
        self._disturbed = False
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK,
                socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
                nft.NETLINK_NETFILTER,
            )
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM)
            self._socket.bind((0, 0))  # without a port of its own it would be told nothing
            self._listen(True)
        except OSError as error:
            raise nft.failure("changes of nftables cannot be listened to", error.errno or 0) from error

    def close(self) -> None:
        """May be called again."""
        self._socket.close()

    def is_disturbed(self) -> bool:
        """Whether there was one since `settle`. It takes 2 µs, and as much for each change of anybody's."""
        try:
            while True:
                if self._concerns(self._socket.recv(netlink.RECEIVE_BYTES)):
                    self._disturbed = True
        except BlockingIOError:
            return self._disturbed
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise nft.failure("changes of nftables cannot be listened to", error.errno or 0) from error
        self._disturbed = True  # some of what there was to hear was lost
        return self.is_disturbed()

    def settle(self) -> None:
        """Whatever was changed is known from here on: all is about to be read."""
        self.is_disturbed()
        self._disturbed = False

    @contextlib.contextmanager
    def ours(self, session: Session) -> Iterator[None]:
        """What this session commits within is no disturbance."""
        self.is_disturbed()
        before, done = session.generation(), session.commits
        self._listen(False)
        try:
            yield
        finally:
            self._listen(True)
            if not 0 <= session.generation() - before <= session.commits - done:
                self._disturbed = True

    def _listen(self, listen: bool) -> None:
        how = _ADD_MEMBERSHIP if listen else _DROP_MEMBERSHIP
        self._socket.setsockopt(netlink.SOL_NETLINK, how, _GROUP)

    def _concerns(self, datagram: bytes) -> bool:
        """Whether any message is about a table of this name."""
        for each in netlink.messages(datagram):
            if each.kind != nft.SUBSYSTEM | Kind.NEW_GENERATION:
                table = nft_answers.table_of(each.payload)
                if table and table.name == self._name:
                    return True
        return False
