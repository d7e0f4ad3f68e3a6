"""One table of the kernel: read, and changed by transactions, without what the kernel refuses."""

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from ebpfproxy.dataplanes.nftables import reading, steps
from ebpfproxy.dataplanes.nftables.commit import committed
from ebpfproxy.dataplanes.nftables.compiled import Compiled, CompiledChain, Held, compiled
from ebpfproxy.dataplanes.nftables.entries import TABLE, Chain, ChainEntry, Entry, Key, nft_family
from ebpfproxy.dataplanes.nftables.steps import Step
from ebpfproxy.errors import KernelError
from ebpfproxy.kernel import nft_messages
from ebpfproxy.kernel.nft import Session
from ebpfproxy.kernel.nft_messages import SetNames, Table
from ebpfproxy.model.address import Family

_LARGE = 2000
"""Rules. Of more than so many in new chains, these come in ahead of the rest, in parts."""

_SETS_IN_A_PART = 400
"""Those that belong to rules. Each of them costs a walk over all operations before it in the transaction
(__nft_set_trans_bind()); each part, one over all chains that there are."""

_CHAINS_IN_A_PART = 20_000
_RULES_IN_A_PART = 10_000
_GRACE = 1.0  # seconds after which nothing in the kernel holds a chain that nothing goes to


class KernelTable:
    """The table `kube-proxy` of one family, in the network namespace of its session.

    `is_doubtful`: the kernel refused something as if the table were not as it was left: it has to be read.
    """

    def __init__(self, of: Family, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_doubtful = False
        self._table = Table(nft_family(of), TABLE)
        self._family = of
        self._session = session
        self._clock = clock
        self._names = SetNames()
        self._held = Held({}, {}, set())
        self._was_read = False  # since the last change of ours
        self._emptied: dict[str, float] = {}  # chains that are to go, and since when

    def read(self) -> dict[Key, Entry]:
        """A chain that was emptied, and waits for the kernel to let go of it, is not there any more.

        Raises NotFound where somebody removes what is being read, and KernelError.
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
        """In one transaction; what it refused, by key. Very many new chains come first, in parts: nothing
        leads to them before that one transaction.

        `read` has to come before. Raises NotFound where somebody removed the table, and KernelError.
        """
        self._let_go(puts)
        of, refused = compiled(self._table.family, puts, drops, self._held)
        ahead = self._new_chains(of)
        if sum(len(chain.rules) for chain in ahead.values()) > _LARGE:
            refused |= self._prepare(of, ahead)
            rest = {key: chain for key, chain in of.chains.items() if key not in ahead}
            of = of._replace(chains=rest)
        whole = steps.transaction(self._table, of, self._held, self._names)
        done = committed(self._session, self._table, whole)
        refused |= done.refused
        self._emptied |= dict.fromkeys(done.emptied, self._clock())
        self._held.take(
            {key: entry for key, entry in puts.items() if key not in refused},
            (key for key in drops if key not in refused),
        )
        self.is_doubtful = self.is_doubtful or (done.is_surprising and not self._was_read)
        self._was_read = False
        return refused

    def _new_chains(self, of: Compiled) -> dict[Chain, CompiledChain]:
        """Those that no packet comes to before something else leads there."""
        return {
            key: chain
            for key, chain in of.chains.items()
            if chain.hook is None and key.name not in self._held.chains
        }

    def _prepare(self, of: Compiled, new: Mapping[Chain, CompiledChain]) -> dict[Key, KernelError]:
        """Bring in new chains, and the sets that their rules look into; of those refused nothing is there."""
        fresh = {key: each for key, each in of.containers.items() if key.name not in self._held.containers}
        bare = of._replace(chains=dict(new), containers=fresh)
        first = itertools.chain(
            [Step(nft_messages.add_table(self._table), None)],
            steps.containers(self._table, bare, self._names),
            steps.chains(self._table, bare),
        )
        refused: dict[Key, KernelError] = {}
        while part := list(itertools.islice(first, _CHAINS_IN_A_PART)):
            refused |= committed(self._session, self._table, part).refused
        for chains in _parts(new):
            rules = steps.rules(self._table, of._replace(chains=chains), self._names)
            refused |= committed(self._session, self._table, rules, abandoning=True).refused
        return refused

    def _let_go(self, puts: Mapping[Key, Entry]) -> None:
        """Delete the chains that nothing holds any more by now; those that still are, are left for later."""
        for key in puts:
            if isinstance(key, Chain):
                self._emptied.pop(key.name, None)
        now = self._clock()
        for name in [name for name, since in self._emptied.items() if now - since >= _GRACE]:
            if not self._session.commit([nft_messages.delete_chain(self._table, name)]):
                del self._emptied[name]


def _parts(chains: Mapping[Chain, CompiledChain]) -> Iterator[dict[Chain, CompiledChain]]:
    part: dict[Chain, CompiledChain] = {}
    sets = rules = 0
    for key, chain in chains.items():
        part[key] = chain
        rules += len(chain.rules)
        sets += sum(len(rule.sets) for rule in chain.rules)
        if sets >= _SETS_IN_A_PART or rules >= _RULES_IN_A_PART:
            yield part
            part, sets, rules = {}, 0, 0
    if part:
        yield part
