"""The nftables backend: the six methods, over the tables `kube-proxy` of both families."""

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Mapping

from ebpfproxy.backends.findings import FAMILY_NOT_SERVED
from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.nftables import probes
from ebpfproxy.backends.nftables.entries import TABLE, Entry, Key
from ebpfproxy.backends.nftables.rendering import render
from ebpfproxy.backends.nftables.settings import NftablesSettings as NftablesSettings
from ebpfproxy.backends.nftables.table import KernelTable
from ebpfproxy.errors import KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.notifications import TableWatch
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan

log = Logger(__name__)

_ATTEMPTS = 3


class NftablesBackend:
    """See `Backend` for the contract. The calling thread's network namespace counts as the node.

    What is in tables of that name is taken over as it is, be it kube-proxy's, and brought in step by the
    first sync. A family that the kernel has no nftables for is not served.
    """

    name = "nftables"

    def __init__(
        self, settings: NftablesSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings or NftablesSettings()
        self._clock = clock
        self._families: tuple[Family, ...] = tuple(Family)
        self._opened: contextlib.ExitStack | None = None  # what `close` closes
        self._generation = 0

    def open(self) -> None:
        """Nothing is written. Raises Unsupported where no family has nftables, or we may not change it."""
        with contextlib.ExitStack() as opened:
            self._session = opened.enter_context(Session())
            self._families = self._served()
            self._watch = TableWatch(TABLE)
            opened.callback(self._watch.close)
            self._tables = {of: KernelTable(of, self._session, self._clock) for of in self._families}
            self._opened = opened.pop_all()

    def _served(self) -> tuple[Family, ...]:
        found = {of: probes.serves(self._session, of) for of in Family}
        served = tuple(of for of in Family if found[of].present)
        for finding in found.values():
            if not served:
                raise Unsupported(f"mode nftables: {finding}", finding.remedy)
            if not finding.present:
                log.warning(FAMILY_NOT_SERVED, reason=str(finding), hint=finding.remedy)
        return served

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        return render(plans, node, self._settings, self._families)

    def read(self) -> dict[Key, Entry]:
        """Where another program changes the tables meanwhile, they are read again."""
        self._check_open()
        for _ in range(_ATTEMPTS):
            self._watch.settle()
            found: dict[Key, Entry] = {}
            try:
                for table in self._tables.values():
                    found |= table.read()
            except NotFound:
                if not self._watch.is_disturbed():
                    raise
            if not self._watch.is_disturbed():
                return found
        raise Rejected(
            f"nftables: the tables {TABLE} changed while they were read, {_ATTEMPTS} times over",
            "if kube-proxy is running on this node, stop it: two cannot have the same tables",
        )

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """One transaction for each family; see `KernelTable.apply`."""
        self._check_open()
        rejected: dict[Key, KernelError] = {}
        with self._watch.own_change(self._session):
            for of, table in self._tables.items():
                puts = {key: entry for key, entry in delta.puts.items() if key.family is of}
                drops = [key for key in delta.drops if key.family is of]
                rejected |= table.apply(puts, drops)
        self._generation += 1
        return rejected

    def generation(self) -> Hashable:
        """Another one each time, from another program's change on, until all is read."""
        self._check_open()
        if self._watch.is_disturbed() or any(table.is_doubtful for table in self._tables.values()):
            self._generation += 1
        return self._generation

    def close(self) -> None:
        """Nothing happens where it is not open."""
        if self._opened:
            self._opened.close()
            self._opened = None

    def _check_open(self) -> None:
        if not self._opened:
            raise KernelError("the nftables backend is not open")
