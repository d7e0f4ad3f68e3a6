"""Who changes what in the tables that iptables-nft keeps in nf_tables, as the kernel announces it.

The number of the whole ruleset's generation (NFT_MSG_GETGEN) also changes with what others have in tables of
their own, which on many nodes is all the time, so changes are counted here one by one.

Sources: include/uapi/linux/netfilter/{nfnetlink,nf_tables}.h; nf_tables_rule_notify() and its like in
net/netfilter/nf_tables_api.c.
"""

import errno
import os
import socket
from collections.abc import Callable

from ebpfproxy.errors import Rejected
from ebpfproxy.kernel.netlink import RECEIVE_BYTES, Message, attributes, messages, text

_NETLINK_NETFILTER = 12
_GROUP = 7  # NFNLGRP_NFTABLES
_SUBSYSTEM = 10  # NFNL_SUBSYS_NFTABLES
_DELTABLE, _NEWCHAIN, _DELCHAIN, _NEWRULE, _DELRULE = 2, 3, 5, 6, 8  # NFT_MSG_*
_HEAD = 4  # bytes of struct nfgenmsg, which begins with the family
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_BUFFER = 1 << 20
_SOCKET_KIND = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC

# Attributes: a table's name is the first one of every kind of message.
_TABLE = 1
_RULE_CHAIN = 2
_CHAIN_NAME = 3


class Changes:
    """Changes of some chains of some tables, both families, since it was made.

    `concerns` says whether a chain is one of those, by its table and name. A table that is deleted counts,
    and so does a rule that is deleted from any chain of those tables, built-in ones included.
    """

    def __init__(self, tables: frozenset[str], concerns: Callable[[str, str], bool]) -> None:
        """In the calling thread's network namespace. Raises Rejected."""
        self._tables = tables
        self._concerns = concerns
        self._count = 0
        try:
            self._socket = socket.socket(
                socket.AF_NETLINK,
                socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC,
                _NETLINK_NETFILTER,
            )
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self._socket.bind((0, 1 << (_GROUP - 1)))
        except OSError as failure:
            raise Rejected(f"cannot follow changes of nf_tables: {failure.strerror}") from failure

    def count(self) -> int:
        """How many there were, or more: what was lost, since there were too many at a time, counts for one.

        It takes microseconds for each change of nf_tables since it was asked last, up to some thousands.
        Raises Rejected.
        """
        while True:
            try:
                datagram, _, flags, sender = self._socket.recvmsg(RECEIVE_BYTES)
            except BlockingIOError:
                return self._count
            except OSError as failure:
                if failure.errno != errno.ENOBUFS:
                    reason = os.strerror(failure.errno or 0)
                    raise Rejected(f"cannot follow changes of nf_tables: {reason}") from failure
                self._count += 1
                continue
            if sender[0] == 0:  # only the kernel has port 0
                self._count += bool(flags & socket.MSG_TRUNC) + sum(map(self._counts, messages(datagram)))

    def close(self) -> None:
        """May be called again."""
        self._socket.close()

    def _counts(self, message: Message) -> bool:
        subsystem, kind = divmod(message.kind, 256)
        if subsystem != _SUBSYSTEM or not message.payload or message.payload[0] not in _FAMILIES:
            return False
        found = dict(attributes(message.payload, _HEAD))
        table = text(found.get(_TABLE))
        if table not in self._tables:
            return False
        if kind in (_DELTABLE, _DELRULE):
            return True
        if kind in (_NEWCHAIN, _DELCHAIN):
            return self._concerns(table, text(found.get(_CHAIN_NAME)))
        return kind == _NEWRULE and self._concerns(table, text(found.get(_RULE_CHAIN)))
