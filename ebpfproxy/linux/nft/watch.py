"""Whether another program changes the tables of a name: notified by the kernel as it happens.

The kernel numbers its generations, but counts everybody's changes in every table, and a CNI plugin may have
its own changed all the time. So this listens to what is changed. What we change ourselves is not listened to:
that we made so many changes, and the generation went on by as many, says that no other program was there.
"""

import contextlib
from collections.abc import Iterator

from ebpfproxy.linux.nft import replies
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.notifications import Announcement, Announcements

_ROOM = 16 << 20
"""Bytes, for 100 000 changes of others between two looks; where that is too little, it counts as a change."""


class TableWatch:
    """In the network namespace in which the calling thread is when it is made."""

    def __init__(self, name: str) -> None:
        """`name` of the tables, of IPv4 and of IPv6. Raises KernelError."""
        self._name = name
        self._disturbed = False
        self._announced = Announcements(_ROOM)

    def close(self) -> None:
        """May be called again."""
        self._announced.close()

    def is_disturbed(self) -> bool:
        """Whether there was one since `settle`. Raises KernelError."""
        for each in self._announced.heard():
            self._disturbed = self._disturbed or each is None or self._concerns(each)
        return self._disturbed

    def settle(self) -> None:
        """Whatever was changed is known from here on: all is about to be read."""
        self.is_disturbed()
        self._disturbed = False

    @contextlib.contextmanager
    def own_change(self, session: Session) -> Iterator[None]:
        """What this session commits within is no disturbance."""
        self.is_disturbed()
        before, done = session.generation(), session.commits
        self._announced.listen(False)
        try:
            yield
        finally:
            self._announced.listen(True)
            if not 0 <= session.generation() - before <= session.commits - done:
                self._disturbed = True

    def _concerns(self, each: Announcement) -> bool:
        table = replies.table_of(each.payload)
        return table is not None and table.name == self._name
