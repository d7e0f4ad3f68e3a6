"""The tables of both address families with one iptables backend, which a backend with rules keeps open."""

from collections.abc import Callable, Collection, Hashable

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.findings import FAMILY_NOT_SERVED
from ebpfproxy.backends.generation import Generation
from ebpfproxy.backends.xtables import cleanup, rejections, tool_backends
from ebpfproxy.backends.xtables.cleanup import Leftovers
from ebpfproxy.backends.xtables.entries import FILTER, NAT, Entry, Key
from ebpfproxy.backends.xtables.layout import Layout
from ebpfproxy.backends.xtables.legacy_edits import LegacyEdits
from ebpfproxy.backends.xtables.rejections import Rejections
from ebpfproxy.backends.xtables.tables import Tables
from ebpfproxy.errors import KernelError, NotFound, Unsupported
from ebpfproxy.linux.xtables import iptables, legacy
from ebpfproxy.linux.xtables.iptables import Iptables, ToolBackend
from ebpfproxy.linux.xtables.nft_changes import Changes
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import IptablesCounts

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
    - `prepare`: see `rejections.try_rule_shapes`.
    """

    def __init__(
        self,
        layout: Layout,
        tables: Collection[str],
        leftovers: Leftovers,
        prepare: Callable[[Family], None] = rejections.prepare_nothing,
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
        """Open the tables and return the tools that are used. `wanted`: see `tool_backends.choose`.

        Writes nothing, with one exception: with iptables-legacy, it creates the tables filter and nat without
        a rule if they were not in use.

        Raises Unsupported if no family can be served.
        """
        self.close()
        self._tool_backend = tool_backends.choose(wanted)
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
        self._tool_backend = tool_backends.choose(wanted)
        self.is_for_reading = True
        tools = [tool for tool in tool_backends.installed()[self._tool_backend] if _has_tables(tool)]
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
        for tables in self._tables.values():
            found.update(tables.read())
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
