"""What the kernel announces of nf_tables as it happens: each object that is made, changed or deleted.

Sources: include/uapi/linux/netfilter/nfnetlink.h; nf_tables_rule_notify() and its like in
net/netfilter/nf_tables_api.c.
"""

import errno
import socket
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.nft import nft

_GROUP = 7  # NFNLGRP_NFTABLES
_ADD_MEMBERSHIP, _DROP_MEMBERSHIP = 1, 2  # NETLINK_*
_SO_RCVBUFFORCE = 33


class Announcement(NamedTuple):
    """`kind` is one of `nft_messages.Kind`, or one that we do not know; `payload` is for `nft_answers`."""

    kind: int
    payload: bytes


class Announcements:
    """In the network namespace in which the calling thread is when it is made."""

    def __init__(self, room: int) -> None:
        """`room`: bytes for what comes between two looks. Raises KernelError."""
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK,
                socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
                nft.NETLINK_NETFILTER,
            )
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, room)
            self._socket.bind((0, 0))  # without a port of its own it receives nothing
        except OSError as error:
            raise _failure(error) from error
        self.listen(True)

    def close(self) -> None:
        """May be called again."""
        self._socket.close()

    def listen(self, listen: bool) -> None:
        """What happens while it does not is never heard of. Raises KernelError."""
        how = _ADD_MEMBERSHIP if listen else _DROP_MEMBERSHIP
        try:
            self._socket.setsockopt(netlink.SOL_NETLINK, how, _GROUP)
        except OSError as error:
            raise _failure(error) from error

    def heard(self) -> Iterator[Announcement | None]:
        """All since it was asked last; None stands for any number that were lost, where there was no room.

        It takes 2 µs, and as much for each. Raises KernelError.
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
                yield Announcement(each.kind & ~nft.SUBSYSTEM, each.payload)


def _failure(error: OSError) -> KernelError:
    return nft.failure("changes of nftables cannot be listened to", error.errno or 0)
