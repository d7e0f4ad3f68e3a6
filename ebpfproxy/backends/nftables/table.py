"""One table of the kernel: read, and changed by transactions, without what the kernel rejects."""

import errno
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from ebpfproxy.backends.nftables import reading, steps
from ebpfproxy.backends.nftables.commit import committed
from ebpfproxy.backends.nftables.compiled import Held, compiled
from ebpfproxy.backends.nftables.entries import (
    TABLE,
    Chain,
    ChainEntry,
    Element,
    Entry,
    Key,
    Map,
    Set,
    nft_family,
)
from ebpfproxy.backends.nftables.node_objects import HAIRPIN_CONNECTIONS
from ebpfproxy.backends.nftables.steps import Step
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.nft import messages
from ebpfproxy.linux.nft.messages import SetNames, Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.model.address import Family

_LARGE = 2000
"""Rules. Of more than so many, those of chains that are no base chains come in ahead, in parts."""

_SETS_IN_A_PART = 400
"""Those that belong to rules. Each of them costs a walk over all operations before it in the transaction
(__nft_set_trans_bind()); each part, one over all chains that there are."""

_CHAINS_IN_A_PART = 20_000
_RULES_IN_A_PART = 10_000
_GRACE = 1.0  # seconds after which nothing in the kernel holds a chain that nothing goes to


class KernelTable:
    """The table `kube-proxy` of one family, in the network namespace of its session.

    `is_doubtful`: the kernel rejected something as if the table were not as it was left: it has to be read.
    """

    def __init__(self, of: Family, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_doubtful = False
        self._table = Table(nft_family(of), TABLE)
        self._family = of
        self._session = session
        self._clock = clock
        self._names = SetNames()
        self._held: Held | None = None  # None: it was not read yet
        self._was_read = False  # since the last change of ours
        self._emptied: dict[str, float] = {}  # chains that are to go, and since when

    def read(self) -> dict[Key, Entry]:
        """A chain that was emptied, and waits for the kernel to let go of it, is not there any more.

        Raises NotFound where another program removes what is being read, and KernelError.
        """
        found = reading.read(self._session, self._table, self._family)
        for name in list(self._emptied):
            key = Chain(self._family, name)
            if found.get(key) == ChainEntry("", ()):
                del found[key]
            else:
                del self._emptied[name]
        self._held = Held({}, {}, set())
        self._held.take(found, ())
        self._was_read, self.is_doubtful = True, False
        return found

    def apply(self, puts: Mapping[Key, Entry], drops: Collection[Key]) -> dict[Key, KernelError]:
        """In one transaction; what it rejected, by key.

        Of very many rules, those of chains that are no base chains come first, in parts. Nothing leads to new
        chains before that one transaction, and other chains change each in one step; what they went to goes
        last.

        Raises NotFound where another program removed the table, and KernelError.
        """
        held = self._known()
        self._let_go(puts)
        rejected: dict[Key, KernelError] = {}
        ahead = _ahead(puts, held)
        if ahead:
            rejected = self._prepare(ahead, puts, held)
        rest = {key: entry for key, entry in puts.items() if key not in ahead}
        rejected |= self._finish(rest, drops, held, rejected)
        held.take(
            {key: entry for key, entry in puts.items() if key not in rejected},
            (key for key in drops if key not in rejected),
        )
        self._was_read = False
        return rejected

    def _known(self) -> Held:
        while self._held is None:
            self.read()
        return self._held

    def _finish(
        self, puts: Mapping[Key, Entry], drops: Collection[Key], held: Held, before: Collection[Key]
    ) -> dict[Key, KernelError]:
        """The one transaction. `before`: what was rejected already."""
        of, rejected = compiled(self._table.family, puts, drops, held)
        whole = steps.transaction(self._table, of, held, self._names)
        done = committed(self._session, self._table, whole, without=[*before, *rejected])
        self._emptied |= dict.fromkeys(done.emptied, self._clock())
        self.is_doubtful = self.is_doubtful or (done.is_surprising and not self._was_read)
        return rejected | done.rejected

    def _prepare(
        self, chains: Mapping[Chain, ChainEntry], puts: Mapping[Key, Entry], held: Held
    ) -> dict[Key, KernelError]:
        """The chains, and the sets that rules look into; of a new chain that is rejected nothing is there.

        What all Services share changes before their own chains do, which may rely on it.
        """
        new = {key: entry for key, entry in chains.items() if key.name not in held.chains}
        rejected = self._prepare_names(new, puts, held)
        for part in _parts(new):
            of, not_understood = compiled(self._table.family, part, (), held)
            rules = itertools.chain(
                steps.abandoned(self._table, not_understood), steps.rules(self._table, of, self._names)
            )
            done = committed(self._session, self._table, rules, abandoning=True)
            rejected |= not_understood | done.rejected
        others = (key for key in chains if key not in new)
        shared_first = sorted(others, key=lambda key: "/" in key.name)
        for part in _parts({key: chains[key] for key in shared_first}):
            of, not_understood = compiled(self._table.family, part, (), held)
            changed = steps.refilled(self._table, of, held, self._names)
            done = committed(self._session, self._table, changed, without=rejected)
            rejected |= not_understood | done.rejected
        return rejected

    def _prepare_names(
        self, new: Mapping[Chain, ChainEntry], puts: Mapping[Key, Entry], held: Held
    ) -> dict[Key, KernelError]:
        """New sets, what endpoints may send to themselves, and the chains without their rules."""
        bare: dict[Key, Entry] = {key: ChainEntry("", ()) for key in new}
        bare |= {
            key: entry
            for key, entry in puts.items()
            if (isinstance(key, Set | Map) and key.name not in held.containers)
            or (isinstance(key, Element) and key.container == HAIRPIN_CONNECTIONS)
        }
        of, rejected = compiled(self._table.family, bare, (), held)
        first = itertools.chain(
            [Step(messages.add_table(self._table), None)],
            steps.containers(self._table, of, self._names),
            steps.elements(self._table, of),
            steps.chains(self._table, of),
        )
        while part := list(itertools.islice(first, _CHAINS_IN_A_PART)):
            rejected |= committed(self._session, self._table, part).rejected
        return rejected

    def _let_go(self, puts: Mapping[Key, Entry]) -> None:
        """Delete the chains that nothing holds any more by now; those that still are, are left for later."""
        for key in puts:
            if isinstance(key, Chain):
                self._emptied.pop(key.name, None)
        now = self._clock()
        for name in [name for name, since in self._emptied.items() if now - since >= _GRACE]:
            rejections = self._session.commit([messages.delete_chain(self._table, name)])
            if not rejections or rejections[0].errno == errno.ENOENT:
                del self._emptied[name]


def _ahead(puts: Mapping[Key, Entry], held: Held) -> dict[Chain, ChainEntry]:
    """The chains that come in ahead, where they are very many: all but those that are base chains, or were.
    None where a set has to be made again: no rule may look into it then, before or after."""
    chains = {
        key: entry
        for key, entry in puts.items()
        if isinstance(key, Chain) and isinstance(entry, ChainEntry)
        if not entry.hook and not held.chains.get(key.name)
    }
    if sum(len(entry.rules) for entry in chains.values()) <= _LARGE:
        return {}
    anew = any(
        held.containers.get(key.name, entry) != entry
        for key, entry in puts.items()
        if isinstance(key, Set | Map)
    )
    return {} if anew else chains


def _parts(chains: Mapping[Chain, ChainEntry]) -> Iterator[dict[Key, Entry]]:
    """So much at a time, that it is never all there as the kernel takes it."""
    part: dict[Key, Entry] = {}
    sets = rules = 0
    for key, entry in chains.items():
        part[key] = entry
        rules += len(entry.rules)
        sets += sum("{" in rule for rule in entry.rules)  # about
        if sets >= _SETS_IN_A_PART or rules >= _RULES_IN_A_PART:
            yield part
            part, sets, rules = {}, 0, 0
    if part:
        yield part
