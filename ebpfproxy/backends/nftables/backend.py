"""The nftables backend: the tables `kube-proxy` of both families."""

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.findings import FAMILY_NOT_SERVED
from ebpfproxy.backends.interface import HOUR
from ebpfproxy.backends.netfilter.nat_backend import NatBackend
from ebpfproxy.backends.nftables import localhost_node_ports, probes
from ebpfproxy.backends.nftables.entries import TABLE, Entry, Key, RelayEntry, RelayKey, nft_family
from ebpfproxy.backends.nftables.flowtable_objects import flow_elements, flowtable_objects
from ebpfproxy.backends.nftables.localhost_node_ports import REJECTING_CHAINS, split
from ebpfproxy.backends.nftables.localhost_relay import LocalhostRelay
from ebpfproxy.backends.nftables.node_objects import node_objects
from ebpfproxy.backends.nftables.readers import frontends, shown
from ebpfproxy.backends.nftables.service_objects import service_objects
from ebpfproxy.backends.nftables.settings import NftablesSettings as NftablesSettings
from ebpfproxy.backends.nftables.table import KernelTable
from ebpfproxy.errors import KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.nft.messages import Table
from ebpfproxy.linux.nft.nft import Session
from ebpfproxy.linux.nft.notifications import TableWatch
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import LocalhostCounts, Report
from ebpfproxy.plan.service_plan import Frontend, NodePlan, ServicePortPlan

log = Logger(__name__)

_ATTEMPTS = 3


class NftablesBackend(NatBackend[Key, Entry]):
    """Tables in the calling thread's network namespace, and a relay for NodePorts at loopback.

    The contents of existing tables of that name, including kube-proxy's, are taken over, and the first sync
    brings them in sync. A family that the kernel has no nftables for is not served.
    """

    name = "nftables"
    reread_seconds = HOUR
    binds_sockets = True

    def __init__(
        self, settings: NftablesSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings or NftablesSettings()
        self._clock = clock
        self._families: tuple[Family, ...] = tuple(Family)
        self._opened: contextlib.ExitStack | None = None  # closed by `close`
        self._relay = LocalhostRelay(self._settings.relay, lambda: self._callbacks.changed())
        self._generation = 0

    def open(self) -> None:
        """Open a netlink session. Nothing is written.

        Raises Unsupported if no family has nftables, or if the agent may not change it.
        """
        with contextlib.ExitStack() as opened:
            self._session = opened.enter_context(Session())
            self._families = self._served_families()
            self._watch = TableWatch(TABLE)
            opened.callback(self._watch.close)
            self._tables = {
                family: KernelTable(family, self._session, self._clock) for family in self._families
            }
            self._opened = opened.pop_all()

    def _served_families(self) -> tuple[Family, ...]:
        found = {family: probes.serves(self._session, family) for family in Family}
        served = tuple(family for family in Family if found[family].present)
        for finding in found.values():
            if not served:
                raise Unsupported(f"mode nftables: {finding}", finding.remedy)
            if not finding.present:
                log.warning(FAMILY_NOT_SERVED, reason=str(finding), hint=finding.remedy)
        return served

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        return render(plans, node, self._settings, self._families)

    def read(self) -> dict[Key, Entry]:
        """Return the entries. If another program changes the tables during the read, read them again."""
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
                found.update(self._relayed().items())
                return found
        raise Rejected(
            f"cannot read the nftables tables {TABLE}: they changed during each of {_ATTEMPTS} reads",
            "stop kube-proxy on this node: it uses the same tables",
        )

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """Commit one transaction for each family (see `KernelTable.apply`), then change the relay."""
        self._check_open()
        of_tables, of_relay = split(delta)
        rejected: dict[Key, KernelError] = {}
        with self._watch.own_change(self._session):
            for family, table in self._tables.items():
                puts = {key: entry for key, entry in of_tables.puts.items() if key.family is family}
                drops = [key for key in of_tables.drops if key.family is family]
                rejected |= table.apply(puts, drops)
        rejected.update(self._relay.apply(of_relay.puts, of_relay.drops).items())
        self._generation += 1
        return rejected

    def check(self, expected: Mapping[Key, Entry]) -> Iterator[bool]:
        """Compare the relay: nothing reports that another program has destroyed one of its sockets."""
        yield self._relay.is_in_sync()

    def report(self) -> Report:
        """Include the NodePorts at loopback: listeners, and packets since the tables were created."""
        syncs = tuple(table.counts for table in self._tables.values())
        return Report(syncs=(*syncs, *self._localhost_counts()))

    def _localhost_counts(self) -> Iterator[LocalhostCounts]:
        served = [family for family in self._families if family in self._settings.localhost]
        if not served:
            return
        with Session() as session:
            for family in served:
                table = Table(nft_family(family), TABLE)
                rejected = {
                    protocol: session.packets(table, chain) for protocol, chain in REJECTING_CHAINS.items()
                }
                counts = self._relay.listeners.get(family, 0), self._relay.failures.get(family, 0)
                yield LocalhostCounts(family, *counts, rejected)

    def generation(self) -> Hashable:
        """Return a value that differs at each call after a change by another program, until everything is
        read.
        """
        self._check_open()
        if self._watch.is_disturbed() or any(table.must_read for table in self._tables.values()):
            self._generation += 1
        return self._generation, self._relay.replaced

    def close(self) -> None:
        """End the relay, and close the session. Do nothing if not open."""
        self._relay.close()
        if self._opened:
            self._opened.close()
            self._opened = None
        super().close()

    def shown(self, key: Key, entry: Any) -> Any:
        return shown(key, entry)

    def _relayed(self) -> dict[RelayKey, RelayEntry]:
        """Return the entries of the relay."""
        return self._relay.read()

    @staticmethod
    def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
        return frontends(keys)

    def _check_open(self) -> None:
        if not self._opened:
            raise KernelError("the nftables backend is not open")


def render(
    plans: Iterable[ServicePortPlan],
    node: NodePlan | None,
    settings: NftablesSettings,
    families: Iterable[Family] = tuple(Family),
) -> dict[Key, Entry]:
    """Return the entries of the plans, and of the node if given. Only for `families`.

    Several plans may render the same key with equal entries. Ports of one Service share the element of its
    ClusterIP in `cluster-ips`. Services share the maps of endpoints and the set of clients with affinity.
    """
    served = frozenset(families)
    entries: dict[Key, Entry] = {}
    for plan in plans:
        if plan.family in served:
            of_plan = dict(service_objects(plan))
            entries.update(of_plan)
            if settings.flowtable:
                entries.update(flow_elements(of_plan))
            if plan.family in settings.localhost:
                entries.update(localhost_node_ports.service_objects(plan))
    if node is not None:
        for family in Family:
            if family in served:
                entries.update(node_objects(node, family, settings))
                if settings.flowtable:
                    entries.update(flowtable_objects(node, family))
    return entries
