"""One table of the kernel: read, and changed by transactions, without what the kernel refuses."""

import errno
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
"""Rules. Of more than so many, those of chains that are no base chains come in ahead, in parts."""

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
        self._held: Held | None = None  # None: it was not read yet
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
        """In one transaction; what it refused, by key.

        Of very many rules, those of chains that are no base chains come first, in parts. Nothing leads to new
        chains before that one transaction, and other chains change each in one step; what they went to goes
        last.

        Raises NotFound where somebody removed the table, and KernelError.
        """
        held = self._known()
        self._let_go(puts)
        of, refused = compiled(self._table.family, puts, drops, held)
        if _is_large(of):
            refused |= self._prepare(of, held)
            of = of._replace(chains={key: chain for key, chain in of.chains.items() if chain.hook})
        whole = steps.transaction(self._table, of, held, self._names)
        done = committed(self._session, self._table, whole, without=refused)
        refused |= done.refused
        self._emptied |= dict.fromkeys(done.emptied, self._clock())
        held.take(
            {key: entry for key, entry in puts.items() if key not in refused},
            (key for key in drops if key not in refused),
        )
        self.is_doubtful = self.is_doubtful or (done.is_surprising and not self._was_read)
        self._was_read = False
        return refused

    def _known(self) -> Held:
        while self._held is None:
            self.read()
        return self._held

    def _prepare(self, of: Compiled, held: Held) -> dict[Key, KernelError]:
        """All regular chains, and the sets that rules look into; of a new chain that is refused nothing is
        there."""
        regular = {key: chain for key, chain in of.chains.items() if chain.hook is None}
        new = {key: chain for key, chain in regular.items() if key.name not in held.chains}
        refused = self._prepare_names(of._replace(chains=new), held)
        for chains in _parts(new):
            rules = steps.rules(self._table, of._replace(chains=chains), self._names)
            refused |= committed(self._session, self._table, rules, abandoning=True).refused
        for chains in _parts({key: chain for key, chain in regular.items() if key not in new}):
            part = of._replace(chains=chains, drops=frozenset())
            changed = steps.refilled(self._table, part, held, self._names)
            refused |= committed(self._session, self._table, changed, without=refused).refused
        return refused

    def _prepare_names(self, of: Compiled, held: Held) -> dict[Key, KernelError]:
        """New sets, and the chains without their rules."""
        fresh = {key: each for key, each in of.containers.items() if key.name not in held.containers}
        first = itertools.chain(
            [Step(nft_messages.add_table(self._table), None)],
            steps.containers(self._table, of._replace(containers=fresh), self._names),
            steps.chains(self._table, of),
        )
        refused: dict[Key, KernelError] = {}
        while part := list(itertools.islice(first, _CHAINS_IN_A_PART)):
            refused |= committed(self._session, self._table, part).refused
        return refused

    def _let_go(self, puts: Mapping[Key, Entry]) -> None:
        """Delete the chains that nothing holds any more by now; those that still are, are left for later."""
        for key in puts:
            if isinstance(key, Chain):
                self._emptied.pop(key.name, None)
        now = self._clock()
        for name in [name for name, since in self._emptied.items() if now - since >= _GRACE]:
            refusals = self._session.commit([nft_messages.delete_chain(self._table, name)])
            if not refusals or refusals[0].errno == errno.ENOENT:
                del self._emptied[name]


def _is_large(of: Compiled) -> bool:
    """Not where a set has to be made anew: no rule may look into it then, before or after."""
    is_large = sum(len(chain.rules) for chain in of.chains.values()) > _LARGE
    return is_large and not any(each.is_other for each in of.containers.values())


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
