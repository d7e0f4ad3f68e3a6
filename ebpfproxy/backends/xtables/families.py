"""The tables of both families, by one backend of the tools: what a backend with rules keeps open."""

from collections.abc import Callable, Collection, Hashable

from ebpfproxy.backends.findings import FAMILY_NOT_SERVED
from ebpfproxy.backends.generation import Generation
from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.xtables import cleanup, rejections, tool_backends
from ebpfproxy.backends.xtables.cleanup import Leftovers
from ebpfproxy.backends.xtables.entries import FILTER, NAT, Entry, Key
from ebpfproxy.backends.xtables.layout import Layout
from ebpfproxy.backends.xtables.legacy_edits import LegacyEdits
from ebpfproxy.backends.xtables.rejections import Rejections
from ebpfproxy.backends.xtables.tables import Tables
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.xtables import iptables, legacy
from ebpfproxy.linux.xtables.iptables import Iptables, ToolBackend
from ebpfproxy.linux.xtables.nft_changes import Changes
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family

log = Logger(__name__)

SELECTED_BACKEND = "Selected iptables backend"
"""`backend` is legacy or nft."""
OTHER_STAYS = "Failed to remove rules of the other iptables backend"
"""Both backends' rules are in force."""
OTHER_REMOVED = "Removed rules of the other iptables backend"
"""Both backends' rules would be in force."""


class TwoFamilies:
    """In the calling thread's network namespace. A family that this machine has no iptables for is left out.

    `tables`: those that the backend has something in. `leftovers`: what of it is removed in the backend
    that is not used, once all is in force: both would be in force at once. `prepare`: see
    `rejections.try_sorts`.
    """

    def __init__(
        self,
        layout: Layout,
        tables: Collection[str],
        leftovers: Leftovers,
        prepare: Callable[[Family], None] = rejections.nothing,
    ) -> None:
        self._prepare = prepare
        self._layout = layout
        self._names = tuple(tables)
        self._leftovers = leftovers
        self._tables: dict[Family, Tables] = {}  # empty: not open
        self._changes: Changes | None = None
        self._edits: LegacyEdits | None = None
        self._generation = Generation(self._look)
        self._settled = False

    @property
    def served(self) -> tuple[Family, ...]:
        """Empty where it is not open."""
        return tuple(self._tables)

    def open(self, wanted: str) -> list[Iptables]:
        """The tools that are used. `wanted`: see `tool_backends.choose`.

        Nothing is written but, with the backend legacy, the tables filter and nat where they were not in
        use, without a rule.

        Raises Unsupported where no family can be served.
        """
        self.close()
        self._tool_backend = tool_backends.choose(wanted)
        tools = [tool for tool in map(self._usable, Family) if tool]
        if not tools:
            raise Unsupported(
                f"iptables of the tool_backend {self._tool_backend} serves no family here",
                "ebpfproxy doctor shows what is missing",
            )
        if self._tool_backend is ToolBackend.NFT:
            self._changes = Changes(frozenset(self._names), self._concerns_us)
        self._tables = {tool.family: Tables(tool, self._layout, self._prepare) for tool in tools}
        if self._tool_backend is ToolBackend.LEGACY:
            self._edits = LegacyEdits(self.served, self._names)
        self._settled = False
        log.info(SELECTED_BACKEND, backend=self._tool_backend, version=tools[0].version)
        return tools

    def read(self) -> dict[Key, Entry]:
        """Raises KernelError."""
        self._generation.reading()
        found: dict[Key, Entry] = {}
        for tables in self._tables.values():
            found.update(tables.read())
        return found

    def apply(self, delta: Delta[Key, Entry]) -> Rejections:
        """One family after the other, each by one run of iptables-restore. Raises KernelError."""
        rejected: Rejections = {}
        with self._generation.own_change():
            for family, tables in self._tables.items():
                rejected.update(tables.apply(_of_family(delta, family)))
            if self._edits and delta:
                self._edits.settle()
        if not self._settled and not rejected:
            self._settled = True
            self._settle()
        return rejected

    def generation(self) -> Hashable:
        """With the backend legacy, what `LegacyEdits` does not notice shows only where everything is read."""
        return self._generation.value()

    def _look(self) -> Hashable:
        if self._changes:
            return self._changes.count()
        sizes = [legacy.fingerprint(family, table) for family in self._tables for table in self._names]
        return self._edits.count() if self._edits else 0, *sizes

    def close(self) -> None:
        """May be called again."""
        self._tables = {}
        if self._changes:
            self._changes.close()
            self._changes = None
        if self._edits:
            self._edits.close()
            self._edits = None

    def _settle(self) -> None:
        for tool_backend in ToolBackend:
            if tool_backend is not self._tool_backend:
                try:
                    removed = cleanup.remove_of(tool_backend, self._leftovers)
                except KernelError as failure:
                    log.warning(OTHER_STAYS, backend=tool_backend, reason=failure.message)
                else:
                    for line in removed:
                        log.info(OTHER_REMOVED, what=line)

    def _usable(self, family: Family) -> Iptables | None:
        try:
            tool = iptables.find(family, self._tool_backend)
            # Of iptables-legacy only what is not in use yet: all else would be copied, and may be large.
            known = legacy.tables(family) if self._tool_backend is ToolBackend.LEGACY else frozenset()
            tool.restore("".join(f"*{table}\nCOMMIT\n" for table in (FILTER, NAT) if table not in known))
        except Unsupported as lack:
            log.warning(FAMILY_NOT_SERVED, family=family.value, reason=lack.message, hint=lack.hint)
            return None
        return tool

    def _concerns_us(self, table: str, chain: str) -> bool:
        return self._layout.chain_key(Family.IPV4, table, chain) is not None


def _of_family(delta: Delta[Key, Entry], family: Family) -> Delta[Key, Entry]:
    puts = {key: entry for key, entry in delta.puts.items() if key.family is family}
    return Delta(puts, frozenset(key for key in delta.drops if key.family is family))
