"""Who changes what in the tables that iptables-nft keeps in nf_tables, as the kernel announces it.

The number of the whole ruleset's generation (NFT_MSG_GETGEN) also changes with what others have in tables of
their own, which on many nodes is all the time, so changes are counted here one by one.
"""

from collections.abc import Callable

from ebpfproxy.linux.netlink.netlink import attributes, text
from ebpfproxy.linux.nft import replies
from ebpfproxy.linux.nft.messages import HEAD, Kind
from ebpfproxy.linux.nft.notifications import Announcement, Announcements

_ROOM = 1 << 20  # bytes, for several thousand changes between two looks
_RULE_CHAIN = 2  # NFTA_RULE_CHAIN
_CHAIN_NAME = 3  # NFTA_CHAIN_NAME


class Changes:
    """Changes of some chains of some tables, both families, since it was made.

    `concerns` says whether a chain is one of those, by its table and name. A table that is deleted counts,
    and so does a rule that is deleted from any chain of those tables, built-in ones included.
    """

    def __init__(self, tables: frozenset[str], concerns: Callable[[str, str], bool]) -> None:
        """In the calling thread's network namespace. Raises KernelError."""
        self._tables = tables
        self._concerns = concerns
        self._count = 0
        self._announced = Announcements(_ROOM)

    def count(self) -> int:
        """How many there were, or more: what was lost, since there were too many at a time, counts for one.

        It takes microseconds for each change of nf_tables since it was asked last, up to some thousands.
        Raises KernelError.
        """
        for each in self._announced.heard():
            self._count += each is None or self._counts(each)
        return self._count

    def close(self) -> None:
        """May be called again."""
        self._announced.close()

    def _counts(self, each: Announcement) -> bool:
        table = replies.table_of(each.payload)
        if table is None or table.name not in self._tables:
            return False
        if each.kind in (Kind.DELETE_TABLE, Kind.DELETE_RULE):
            return True
        found = dict(attributes(each.payload, HEAD.size))
        if each.kind in (Kind.NEW_CHAIN, Kind.DELETE_CHAIN):
            return self._concerns(table.name, text(found.get(_CHAIN_NAME)))
        return each.kind == Kind.NEW_RULE and self._concerns(table.name, text(found.get(_RULE_CHAIN)))
