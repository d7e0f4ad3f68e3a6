"""One table of the kernel: reads it, and commits changes without the parts that the kernel rejects."""

import errno
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from ebpfproxy.backends.nftables import reading
from ebpfproxy.backends.nftables.changes import Change, Phase, Step, chain_deletions, declared
from ebpfproxy.backends.nftables.clients import Clients
from ebpfproxy.backends.nftables.commit import commit_steps
from ebpfproxy.backends.nftables.entries import (
    TABLE,
    Chain,
    ChainEntry,
    Element,
    Endpoints,
    Entry,
    Flowtable,
    Key,
    Map,
    Set,
    nft_family,
)
from ebpfproxy.backends.nftables.node_objects import AFFINITY, EQUAL_BYTES
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.nft import messages
from ebpfproxy.linux.nft.messages import Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.rule_expressions import SetNames
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import NftablesCounts

_LARGE = 2000
"""If a change has more rules than this, the rules of regular chains are written first, in parts."""

_SETS_IN_A_PART = 400
"""Anonymous sets in one part. For each, the kernel walks over all earlier operations of the transaction
(__nft_set_trans_bind()). For each part, it walks over all chains of the table.
"""

_STEPS_IN_A_PART = 4000
_RULES_IN_A_PART = 2000
"""Small parts save memory: the messages of 10,000 rules take 15 MB."""
_RELEASE_DELAY = 1.0  # seconds after which the kernel has released a chain that nothing jumps to


class KernelTable:
    """The table `kube-proxy` of one family, in the network namespace of its session.

    `must_read`: the kernel rejected something that suggests an unexpected state of the table, so it must be
    read.
    """

    def __init__(self, family: Family, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self.must_read = False
        self.counts = NftablesCounts(family)
        """For any thread: it is replaced as a unit."""
        self._table = Table(nft_family(family), TABLE)
        self._family = family
        self._session = session
        self._clock = clock
        self._names = SetNames()
        self._clients = Clients(session, self._table)
        self._known: dict[Key, Entry] | None = None  # see `Change`; None: not read yet
        self._was_read = False  # since the agent's last change
        self._emptied: dict[str, float] = {}  # chains to delete, with the time when they were emptied

    def read(self) -> dict[Key, Entry]:
        """Return the entries. A chain that was emptied and waits for its deletion is omitted.

        Raises NotFound if another program removes an object during the read, and KernelError.
        """
        found = reading.read(self._session, self._table, self._family)
        for name in list(self._emptied):
            key = Chain(self._family, name)
            if found.get(key) == ChainEntry(""):
                del found[key]
            else:
                del self._emptied[name]
        self._known = {key: _known(entry) for key, entry in found.items()}
        self._clients.read(found)
        self._was_read, self.must_read = True, False
        return found

    def apply(self, puts: Mapping[Key, Entry], drops: Collection[Key]) -> dict[Key, KernelError]:
        """Apply puts and drops in one transaction, and return what was rejected, by key.

        If there are very many rules, those of regular chains are written first, in parts. Nothing jumps to
        new chains before the final transaction. Each existing chain changes atomically. Chains that it no
        longer jumps to are deleted last.

        Raises NotFound if another program removed the table, and KernelError.
        """
        while self._known is None:
            self.read()
        has_failed = True
        try:
            rejected = self._apply(puts, drops, self._known)
            has_failed = bool(rejected)
        finally:
            failures = self.counts.sync_failures + has_failed
            self.counts = self.counts._replace(sync_failures=failures)
        return rejected

    def _apply(
        self, puts: Mapping[Key, Entry], drops: Collection[Key], known: dict[Key, Entry]
    ) -> dict[Key, KernelError]:
        self._delete_emptied(puts)
        self._clients.forget(puts)
        rejected: dict[Key, KernelError] = {}
        first = _chains_to_prepare(puts, known)
        if first:
            rejected = self._prepare(first, puts, known)
        rest = {key: entry for key, entry in puts.items() if key not in first}
        rejected |= self._finish(rest, drops, known, rejected)
        written = {key: entry for key, entry in puts.items() if key not in rejected}
        dropped = [key for key in drops if key not in rejected]
        for key in dropped:
            known.pop(key, None)
        known.update((key, _known(entry)) for key, entry in written.items())
        self._clients.update(written, dropped)
        self._was_read = False
        return rejected

    def _finish(
        self,
        puts: Mapping[Key, Entry],
        drops: Collection[Key],
        known: dict[Key, Entry],
        before: Collection[Key],
    ) -> dict[Key, KernelError]:
        """Commit the final transaction. `before`: the keys that were already rejected."""
        change = Change(self._table, puts, drops, known, self._names)
        clients = self._clients.former(puts, drops)
        all_steps = itertools.chain(
            () if known else [Step(messages.add_table(self._table), None)],
            change.steps(),
            (Step(each, None) for each in messages.add_elements(self._table, AFFINITY, clients)),
        )
        done = commit_steps(self._session, self._table, all_steps, without=[*before, *change.rejected])
        self._emptied |= dict.fromkeys(done.emptied, self._clock())
        self.must_read = self.must_read or (done.is_unexpected and not self._was_read)
        return change.rejected | done.rejected

    def _prepare(
        self, chains: Mapping[Chain, ChainEntry], puts: Mapping[Key, Entry], known: dict[Key, Entry]
    ) -> dict[Key, KernelError]:
        """Write the chains, and the sets that their rules look up. A new chain with a rejected rule is
        deleted.

        Shared chains change before those of Services, which may depend on them.
        """
        new = {key: entry for key, entry in chains.items() if key not in known}
        rejected = self._prepare_names(new, puts, known)
        for part in _parts(new):
            change = Change(self._table, part, (), known, self._names)
            deletions = chain_deletions(self._table, change.rejected)
            rules = itertools.chain(deletions, change.steps(Phase.RULES))
            done = commit_steps(self._session, self._table, rules, abandoning=True)
            rejected |= change.rejected | done.rejected
        others = (key for key in chains if key not in new)
        shared_first = sorted(others, key=lambda key: "/" in key.name)
        for part in _parts({key: chains[key] for key in shared_first}):
            change = Change(self._table, part, (), known, self._names)
            refills = change.steps(Phase.FLUSH, Phase.RULES)
            done = commit_steps(self._session, self._table, refills, without=rejected)
            rejected |= change.rejected | done.rejected
        return rejected

    def _prepare_names(
        self, new: Mapping[Chain, ChainEntry], puts: Mapping[Key, Entry], known: dict[Key, Entry]
    ) -> dict[Key, KernelError]:
        """Create new sets and flowtables, the elements that rules of the parts need, and the new chains
        without rules."""
        bare: dict[Key, Entry] = {key: ChainEntry("") for key in new}
        bare |= {
            key: entry
            for key, entry in puts.items()
            if (isinstance(key, Set | Map) and declared(known, key) is None)
            or (isinstance(key, Flowtable) and key not in known)
            or (isinstance(key, Element) and key.container == EQUAL_BYTES)
            or (isinstance(key, Endpoints) and key not in known)
        }
        change = Change(self._table, bare, (), known, self._names)
        rejected = dict(change.rejected)
        creations = itertools.chain(
            [Step(messages.add_table(self._table), None)],
            change.steps(Phase.CONTAINERS, Phase.ELEMENTS, Phase.CHAINS),
        )
        while part := list(itertools.islice(creations, _STEPS_IN_A_PART)):
            rejected |= commit_steps(self._session, self._table, part).rejected
        written = ((key, each) for key, each in bare.items() if isinstance(key, Endpoints))
        known.update((key, each) for key, each in written if key not in rejected)
        return rejected

    def _delete_emptied(self, puts: Mapping[Key, Entry]) -> None:
        """Delete the emptied chains that nothing refers to any more. Retry the others later."""
        for key in puts:
            if isinstance(key, Chain):
                self._emptied.pop(key.name, None)
        now = self._clock()
        for name in [name for name, since in self._emptied.items() if now - since >= _RELEASE_DELAY]:
            rejections = self._session.commit([messages.delete_chain(self._table, name)])
            if not rejections or rejections[0].errno == errno.ENOENT:
                del self._emptied[name]
            else:
                failures = self.counts.cleanup_failures + 1
                self.counts = self.counts._replace(cleanup_failures=failures)


_NO_CHAIN = ChainEntry("")


def _known(entry: Entry) -> Entry:
    """Return what `Change` needs to know of an entry. So the rules of an earlier read need no memory."""
    return ChainEntry(entry.hook) if isinstance(entry, ChainEntry) else entry


def _chains_to_prepare(puts: Mapping[Key, Entry], known: dict[Key, Entry]) -> dict[Chain, ChainEntry]:
    """Return the chains to write first if they have very many rules: all except current and former base
    chains.

    Empty if a set or flowtable must be recreated, since no rule may use it during the change.
    """
    chains = {
        key: entry
        for key, entry in puts.items()
        if isinstance(key, Chain) and isinstance(entry, ChainEntry)
        if not entry.hook and known.get(key, _NO_CHAIN) == _NO_CHAIN
    }
    if sum(len(entry.rules) for entry in chains.values()) <= _LARGE:
        return {}
    recreated = any(
        declared(known, key) not in (None, entry) for key, entry in puts.items() if isinstance(key, Set | Map)
    )
    recreated = recreated or any(isinstance(key, Flowtable) and key in known for key in puts)
    return {} if recreated else chains


def _parts(chains: Mapping[Chain, ChainEntry]) -> Iterator[dict[Key, Entry]]:
    """Split the chains, so that the compiled form of only one part is in memory at a time."""
    part: dict[Key, Entry] = {}
    sets = rules = 0
    for key, entry in chains.items():
        part[key] = entry
        rules += len(entry.rules)
        sets += sum(" != { " in rule.text for rule in entry.rules)
        if sets >= _SETS_IN_A_PART or rules >= _RULES_IN_A_PART:
            yield part
            part, sets, rules = {}, 0, 0
    if part:
        yield part
