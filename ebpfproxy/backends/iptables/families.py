"""The tables of both address families with one iptables backend, which a backend with rules keeps open."""

import time
from collections.abc import Callable, Collection, Hashable

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.findings import FAMILY_NOT_SERVED
from ebpfproxy.backends.generation import Generation
from ebpfproxy.backends.iptables import cleanup, probes, tables
from ebpfproxy.backends.iptables.cleanup import Leftovers
from ebpfproxy.backends.iptables.entries import FILTER, NAT, Entry, Key, Layout
from ebpfproxy.backends.iptables.tables import Rejections, Tables
from ebpfproxy.errors import KernelError, NotFound, Unsupported
from ebpfproxy.linux.inotify import OpenedFile
from ebpfproxy.linux.nft.notifications import Changes
from ebpfproxy.linux.xtables import iptables, legacy
from ebpfproxy.linux.xtables.iptables import Iptables, ToolBackend
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import IptablesCounts

log = Logger(__name__)

NOTICED_LATE = "Some changes of rules are noticed late"
"""The lock file of iptables cannot be watched: a replaced rule of the same size is found within an
hour.
"""

LARGEST = 32 << 20
"""The largest table in bytes that is compared."""

_PAUSE_FACTOR = 10
"""The pause after a comparison, as a multiple of its duration. So comparisons take less than a tenth of the
time.
"""

_Digest = Callable[[Family, str, int], int]


class LegacyEdits:
    """Counts changes by other programs that do not change the number and sizes of the rules of
    iptables-legacy, in the calling thread's network namespace.

    The kernel sends no notification, and returns only complete tables. So a table is compared only after
    another program opened /run/xtables.lock, which every tool does that changes a table. A tool in another
    container may use a lock file of its own, and its change is missed.

    The table is then copied and compared by its checksum. For 1000 Services with 3 endpoints this takes 10 ms
    of CPU time. For 10 000 Services with 10 endpoints it would take half a second and 100 to 200 MB of
    memory, each time a program uses iptables. So larger tables are compared only when everything is read.
    """

    def __init__(
        self,
        families: Collection[Family],
        tables: Collection[str],
        clock: Callable[[], float] = time.monotonic,
        digest: _Digest = legacy.digest,
    ) -> None:
        self._tables = [(family, table) for family in families for table in tables]
        self._clock = clock
        self._digest = digest
        self._count = 0
        self._known_digests: list[int] | None = None  # None: not compared yet
        self._lock_opened = False
        self._not_before = 0.0
        self._lock = _watch_lock()

    def settle(self) -> None:
        """Record the current contents of the tables as the agent's own. Raises KernelError."""
        self._lock_opened = False
        if self._lock:
            self._lock.was_opened()
            self._known_digests = self._digests()

    def count(self) -> int:
        """Return the number of detected changes. Raises KernelError."""
        if self._lock is None:
            return self._count
        self._lock_opened = self._lock.was_opened() or self._lock_opened
        now = self._clock()
        if now >= self._not_before and (self._lock_opened or self._known_digests is None):
            found = self._digests()
            self._count += self._known_digests is not None and found != self._known_digests
            self._known_digests, self._lock_opened = found, False
            ended = self._clock()
            self._not_before = ended + _PAUSE_FACTOR * (ended - now)
        return self._count

    def _digests(self) -> list[int]:
        return [self._digest(*table, LARGEST) for table in self._tables]

    def close(self) -> None:
        """May be called repeatedly."""
        if self._lock:
            self._lock.close()


def _watch_lock() -> OpenedFile | None:
    try:
        return OpenedFile(legacy.LOCK_FILE)
    except KernelError as failure:
        log.warning(NOTICED_LATE, reason=failure.message, hint=failure.hint)
        return None


log = Logger(__name__)

SELECTED_BACKEND = "Selected iptables backend"
"""`backend` is legacy or nft."""
OTHER_STAYS = "Failed to remove rules of the other iptables backend"
"""The rules of both iptables backends are in force."""
OTHER_REMOVED = "Removed rules of the other iptables backend"
"""Otherwise the rules of both iptables backends would be in force."""


class TwoFamilies:
    """The tables of IPv4 and IPv6 in the calling thread's network namespace. A family without an iptables
    tool is not served.

    - `tables`: the tables that the backend uses.
    - `leftovers`: selects the chains to remove from the unused iptables backend, once all rules are in force.
      Otherwise the rules of both would be in force.
    - `prepare`: see `tables.try_rule_shapes`.
    """

    def __init__(
        self,
        layout: Layout,
        tables: Collection[str],
        leftovers: Leftovers,
        prepare: Callable[[Family], None] = tables.prepare_nothing,
    ) -> None:
        self._prepare = prepare
        self._layout = layout
        self._names = tuple(tables)
        self._leftovers = leftovers
        self._tables: dict[Family, Tables] = {}  # empty: not open
        self._changes: Changes | None = None
        self._edits: LegacyEdits | None = None
        self._generation = Generation(self._observe)
        self._other_backend_clean = False
        self.is_for_reading = False
        """Whether it was opened by `open_to_read`."""

    @property
    def served(self) -> tuple[Family, ...]:
        """The families that are served. Empty if not open."""
        return tuple(self._tables)

    def open(self, wanted: str) -> list[Iptables]:
        """Open the tables and return the tools that are used. `wanted`: see `probes.choose`.

        Writes nothing, with one exception: with iptables-legacy, it creates the tables filter and nat without
        a rule if they were not in use.

        Raises Unsupported if no family can be served.
        """
        self.close()
        self._tool_backend = probes.choose(wanted)
        self.is_for_reading = False
        tools = [tool for tool in map(self._find_tool, Family) if tool]
        if not tools:
            raise Unsupported(
                f"cannot serve any address family with the iptables backend {self._tool_backend}",
                "run ebpfproxy doctor to see what is missing",
            )
        if self._tool_backend is ToolBackend.NFT:
            self._changes = Changes(frozenset(self._names), self._is_own_chain)
        self._tables = {tool.family: Tables(tool, self._layout, self._prepare) for tool in tools}
        if self._tool_backend is ToolBackend.LEGACY:
            self._edits = LegacyEdits(self.served, self._names)
        self._other_backend_clean = False
        log.info(SELECTED_BACKEND, backend=self._tool_backend, version=tools[0].version)
        return tools

    def open_to_read(self, wanted: str) -> list[Iptables]:
        """Like `open`, but only `served` and `read` may be used, and nothing is written.

        A family is served if its tool is installed and, with iptables-legacy, if its tables exist.
        """
        self.close()
        self._tool_backend = probes.choose(wanted)
        self.is_for_reading = True
        tools = [tool for tool in probes.installed()[self._tool_backend] if _has_tables(tool)]
        if not tools:
            raise NotFound(
                f"no tables of the iptables backend {self._tool_backend}",
                "check --proxy-mode and --iptables-backend, and that the command runs in the agent's network "
                "namespace",
            )
        self._tables = {tool.family: Tables(tool, self._layout) for tool in tools}
        return tools

    def read(self) -> dict[Key, Entry]:
        """Return the entries of all served families. Raises KernelError."""
        if not self.is_for_reading:
            self._generation.reading()
        found: dict[Key, Entry] = {}
        for each in self._tables.values():
            found.update(each.read())
        return found

    def apply(self, delta: Delta[Key, Entry]) -> Rejections:
        """Apply the delta to one family after the other, with one run of iptables-restore each. Raises
        KernelError.
        """
        rejected: Rejections = {}
        with self._generation.own_change():
            for family, tables in self._tables.items():
                rejected.update(tables.apply(_of_family(delta, family)))
            if self._edits and delta:
                self._edits.settle()
        if not self._other_backend_clean and not rejected:
            self._other_backend_clean = True
            self._clean_other_backend()
        return rejected

    def counts(self) -> tuple[IptablesCounts, ...]:
        """Return the counts of each family. Any thread may call it."""
        return tuple(tables.counts for tables in self._tables.values())

    def generation(self) -> Hashable:
        """Return a value that differs after changes. With iptables-legacy, changes that `LegacyEdits` misses
        are found only when everything is read.
        """
        return self._generation.value()

    def _observe(self) -> Hashable:
        if self._changes:
            return self._changes.count()
        sizes = [legacy.fingerprint(family, table) for family in self._tables for table in self._names]
        return self._edits.count() if self._edits else 0, *sizes

    def close(self) -> None:
        """May be called repeatedly."""
        self._tables = {}
        if self._changes:
            self._changes.close()
            self._changes = None
        if self._edits:
            self._edits.close()
            self._edits = None

    def _clean_other_backend(self) -> None:
        for tool_backend in ToolBackend:
            if tool_backend is not self._tool_backend:
                try:
                    removed = cleanup.remove_of(tool_backend, self._leftovers)
                except KernelError as failure:
                    log.warning(OTHER_STAYS, backend=tool_backend, reason=failure.message)
                else:
                    for line in removed:
                        log.info(OTHER_REMOVED, what=line)

    def _find_tool(self, family: Family) -> Iptables | None:
        try:
            tool = iptables.find(family, self._tool_backend)
            # Skip tables of iptables-legacy that are in use: the tool would copy them, and they may be large.
            known = legacy.tables(family) if self._tool_backend is ToolBackend.LEGACY else frozenset()
            tool.restore("".join(f"*{table}\nCOMMIT\n" for table in (FILTER, NAT) if table not in known))
        except Unsupported as lack:
            log.warning(FAMILY_NOT_SERVED, family=family.value, reason=lack.message, hint=lack.hint)
            return None
        return tool

    def _is_own_chain(self, table: str, chain: str) -> bool:
        return self._layout.chain_key(Family.IPV4, table, chain) is not None


def _has_tables(tool: Iptables) -> bool:
    return tool.tool_backend is ToolBackend.NFT or NAT in legacy.tables(tool.family)


def _of_family(delta: Delta[Key, Entry], family: Family) -> Delta[Key, Entry]:
    puts = {key: entry for key, entry in delta.puts.items() if key.family is family}
    return Delta(puts, frozenset(key for key in delta.drops if key.family is family))
