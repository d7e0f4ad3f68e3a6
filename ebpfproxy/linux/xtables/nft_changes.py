"""Counts changes of the tables of iptables-nft, which are in nf_tables, from the kernel's notifications.

The generation number of the ruleset (NFT_MSG_GETGEN) is no substitute: it also changes with the tables of
other programs, on many nodes all the time.
"""

from collections.abc import Callable

from ebpfproxy.linux.netlink.netlink import attributes, text
from ebpfproxy.linux.nft import replies
from ebpfproxy.linux.nft.messages import HEAD, Kind
from ebpfproxy.linux.nft.notifications import Notification, Notifications

_BUFFER_BYTES = 1 << 20  # for several thousand changes between two calls of `count`
_RULE_CHAIN = 2  # NFTA_RULE_CHAIN
_CHAIN_NAME = 3  # NFTA_CHAIN_NAME


class Changes:
    """Counts changes of chains since its creation, in both families.

    `concerns` returns whether a chain counts, given its table and name. A deleted table always counts, and so
    does a rule that is deleted from any chain of `tables`, including the built-in chains.
    """

    def __init__(self, tables: frozenset[str], concerns: Callable[[str, str], bool]) -> None:
        """Count in the calling thread's network namespace. Raises KernelError."""
        self._tables = tables
        self._concerns = concerns
        self._count = 0
        self._notifications = Notifications(_BUFFER_BYTES)

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
