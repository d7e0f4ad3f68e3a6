"""The clients with session affinity: the elements of the set `affinity`, which rules add."""

import collections
import errno
import itertools
import sys
from collections.abc import Collection, Iterable, Mapping

from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, Entry, Key, Set
from ebpfproxy.backends.nftables.names import affinity_number_of_set
from ebpfproxy.backends.nftables.node_objects import AFFINITY, AFFINITY_MAX
from ebpfproxy.errors import NotFound
from ebpfproxy.linux.nft import messages, nft
from ebpfproxy.linux.nft.messages import Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.sets import SetElement

_MAX_LOST = 10_000
"""If more endpoints than this were lost, any new endpoint may be one of them."""

_ATTEMPTS = 5
_DELETED_AT_ONCE = 100  # the length of an attribute is a u16


class Clients:
    """The clients in one table. Each element has the number of its endpoint, `affinity_number`.

    A client whose endpoint is lost selects another one, and stays there if the first one returns, as with
    kube-proxy, which deletes the endpoint's set. So before rules get a number that they did not have, its
    clients from an earlier time are deleted.
    """

    def __init__(self, session: Session, table: Table) -> None:
        self._session = session
        self._table = table
        self._numbers: dict[str, frozenset[int]] = {}
        """The numbers that the rules of each chain remember clients with, without chains that have none."""
        self._chains: collections.Counter[int] = collections.Counter()  # that have this number
        self._lost: set[int] | None = None
        """Numbers that may have clients, but no rules. None: it can be any number."""

    def read(self, found: Mapping[Key, Entry]) -> None:
        """Take the numbers from all entries of the table."""
        before = set(self._chains)
        self._numbers, self._chains = {}, collections.Counter()
        self.update(found, ())
        self._lose(before - self._chains.keys())

    def update(self, puts: Mapping[Key, Entry], drops: Iterable[Key]) -> None:
        """Record that these puts and drops were committed."""
        before: set[int] = set()
        for chain, numbers in self._changes(puts, drops):
            old = self._numbers.pop(chain, frozenset())
            if numbers:
                self._numbers[chain] = numbers
            before |= old
            self._chains.update(numbers)
            self._chains.subtract(old)
        unused = {number for number in before if not self._chains[number]}
        for number in unused:
            del self._chains[number]
        self._lose(unused)

    def forget(self, puts: Mapping[Key, Entry]) -> None:
        """Delete the clients of lost endpoints if the puts may have one of these endpoints.

        It reads the whole set, so it does nothing if all new endpoints are others. Raises KernelError.
        """
        added = {number for _, numbers in self._changes(puts, ()) for number in numbers} - self._chains.keys()
        if not added or (self._lost is not None and added.isdisjoint(self._lost)):
            return
        if any(self._delete_unknown() for _ in range(_ATTEMPTS)):
            self._lost = set()

    def _delete_unknown(self) -> bool:
        """Delete all clients whose number no rule has. Return False if one of them timed out meanwhile."""
        gone = [SetElement(each.key) for each in self._all() if _number(each) not in self._chains]
        parts = (gone[at : at + _DELETED_AT_ONCE] for at in range(0, len(gone), _DELETED_AT_ONCE))
        rejections = self._session.commit([messages.delete_elements(self._table, AFFINITY, p) for p in parts])
        for each in rejections:
            if each.errno != errno.ENOENT:
                raise nft.failure(f"cannot change the nftables set {AFFINITY}", each.errno, each.reason)
        return not rejections

    def former(self, puts: Mapping[Key, Entry], drops: Collection[Key]) -> list[SetElement]:
        """Return the clients in the affinity sets of kube-proxy or a previous version that are dropped.

        They had a set for each endpoint. The numbers of the endpoints follow from the names.
        """
        clients: dict[bytes, SetElement] = {}
        if not any(isinstance(key, Set) and key.name == AFFINITY for key in puts):
            return []
        for key in drops:
            number = affinity_number_of_set(key.name) if isinstance(key, Set) else None
            if number is None or not isinstance(key, Set):
                continue
            for each in self._session.elements(self._table, key.name):
                if each.expires:
                    client = each.key + number.to_bytes(4, sys.byteorder)
                    clients[client] = SetElement(client, timeout=each.timeout, expires=each.expires)
        return list(clients.values())[:AFFINITY_MAX]

    def _changes(
        self, puts: Mapping[Key, Entry], drops: Iterable[Key]
    ) -> Iterable[tuple[str, frozenset[int]]]:
        """Yield each chain with the numbers it gets, without chains that have none before and after."""
        put = (
            (key.name, frozenset(each.remembers for each in entry.rules if each.remembers is not None))
            for key, entry in puts.items()
            if isinstance(key, Chain) and isinstance(entry, ChainEntry)
        )
        dropped = ((key.name, frozenset[int]()) for key in drops if isinstance(key, Chain))
        for name, numbers in itertools.chain(dropped, put):
            if numbers or name in self._numbers:
                yield name, numbers

    def _lose(self, numbers: set[int]) -> None:
        if self._lost is not None:
            self._lost |= numbers
            if len(self._lost) > _MAX_LOST:
                self._lost = None

    def _all(self) -> list[SetElement]:
        try:
            return self._session.elements(self._table, AFFINITY)
        except NotFound:
            return []


def _number(client: SetElement) -> int:
    return int.from_bytes(client.key[-4:], sys.byteorder)
