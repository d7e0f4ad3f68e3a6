"""The iptables tables of one family: reads them as entries, and changes them by deltas."""

from collections.abc import Callable, Collection, Iterable

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.xtables import rejections, saved, script
from ebpfproxy.backends.xtables.entries import FILTER, NAT, Chain, Entry, Key, Rule, SharedChain
from ebpfproxy.backends.xtables.layout import Layout
from ebpfproxy.backends.xtables.rejections import Rejections
from ebpfproxy.backends.xtables.saved import TableState
from ebpfproxy.backends.xtables.script import Script
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import IptablesCounts

_ATTEMPTS = 6
_STATE_DEPENDENT = ("-D ", "-N ", "-X ")


class Tables:
    """The tables of one family with one iptables backend, in the network namespace of the calling thread."""

    def __init__(
        self, tool: Iptables, layout: Layout, prepare: Callable[[Family], None] = rejections.prepare_nothing
    ) -> None:
        """`prepare`: see `rejections.try_rule_shapes`."""
        self._prepare = prepare
        self._layout = layout
        self._tool = tool
        self._block = script.block_for(tool.tool_backend)
        self._state: TableState | None = None  # None: unknown, must be read
        self._last_read: dict[Key, Entry] | None = None  # the entries of the last read, until the next change
        self._rejected: dict[Key, tuple[Entry, KernelError]] = {}  # puts that were rejected
        self._causes: frozenset[Key] = frozenset()  # rejected themselves, not for a chain that they jump to
        self._sizes: dict[Key, int] = {}  # of the own chains: the number of their rules
        self.counts = IptablesCounts(tool.family, rules=dict(_NO_RULES), rules_last=dict(_NO_RULES))
        """For any thread: it is replaced as a unit."""

    def read(self) -> dict[Key, Entry]:
        """Return the own entries in the kernel. Raises KernelError."""
        self._state = None
        found, self._state = saved.parse(self._tool.family, self._tool.save(), self._layout)
        self._last_read = found
        self._sizes = {key: _size(key, entry) for key, entry in found.items() if isinstance(key, Chain)}
        self.counts = self.counts._replace(
            rules=_by_table([*self._sizes.items(), *self._state.copies.items()])
        )
        return found

    def apply(self, delta: Delta[Key, Entry]) -> Rejections:
        """Apply the delta and return what was rejected, by key. After a KernelError the state is unknown.

        A line may be rejected because another program changed the tables since the last read. So everything
        is read again. What is rejected then is omitted, together with all entries that depend on it, and the
        rest is tried again.
        """
        is_partial = self._state is not None and self._last_read is None
        state, self._state = self._state or self._read_state(), None
        causes, rejected = self._rejected_before(delta)
        for attempt in range(_ATTEMPTS):
            remaining = _without(delta, rejected)
            lines = script.compose(remaining, state, self._layout, self._block)
            try:
                if lines:
                    self._restore(lines, is_partial)
                break
            except LinesRejected as failure:
                if attempt == _ATTEMPTS - 1:
                    raise
                state, is_partial = self._read_state(), False
                delta = diff(self._last_read or {}, delta.puts, delta.puts.keys() | delta.drops)
                causes = causes | self._blamed(delta, lines, failure)
                rejected = rejections.with_dependents(causes, delta, self._last_read or {}, self._layout)
        self._record(remaining, state)
        self._causes = frozenset(causes)
        self._rejected = {
            key: (delta.puts[key], error) for key, error in rejected.items() if key in delta.puts
        }
        return rejected | _in_use(remaining, state)

    def _restore(self, lines: Script, is_partial: bool) -> None:
        try:
            self._tool.restore(lines.text)
        except KernelError:
            counts = self.counts
            self.counts = counts._replace(
                restore_failures=counts.restore_failures + 1,
                partial_failures=(counts.partial_failures or 0) + is_partial,
            )
            raise

    def _read_state(self) -> TableState:
        self.read()
        assert self._state is not None
        return self._state

    def _blamed(self, delta: Delta[Key, Entry], lines: Script, failure: LinesRejected) -> Rejections:
        """Return the puts that are rejected themselves, or that contain a rule of a rejected shape."""
        at_fault = [n for n in failure.lines if not lines.line(n).startswith(_STATE_DEPENDENT)]
        blamed = rejections.try_rule_shapes(self._tool, delta.puts, self._prepare) if at_fault else {}
        for number in at_fault:
            owner = lines.owner(number)
            if owner and owner in delta.puts:
                blamed[owner] = rejections.rejection(owner, failure, number)
        return blamed

    def _rejected_before(self, delta: Delta[Key, Entry]) -> tuple[Rejections, Rejections]:
        """Return the earlier rejections that apply again, as the delta puts the same entries: their causes,
        and all of them.

        The agent puts rejected entries again at every change. After a read, the rule shapes are tried again
        in a temporary network namespace.
        """
        unchanged = {
            key: error for key, (entry, error) in self._rejected.items() if delta.puts.get(key) == entry
        }
        causes = {key: unchanged[key] for key in self._causes if key in unchanged}
        if causes and self._last_read is not None:
            tried = {key: delta.puts[key] for key in causes}
            causes = rejections.try_rule_shapes(self._tool, tried, self._prepare)
            return causes, rejections.with_dependents(causes, delta, self._last_read, self._layout)
        if len(causes) < len(self._causes):  # entries that depended on former causes must be tried
            return causes, causes
        return causes, unchanged

    def _record(self, applied: Delta[Key, Entry], state: TableState) -> None:
        self._count(applied, state)
        for key in applied.puts:
            if isinstance(key, Rule):
                state.copies[key] = 1
            elif isinstance(key, SharedChain):
                state.shared.add(key)
        for key in applied.drops:
            if isinstance(key, Rule):
                state.copies.pop(key, None)
            elif isinstance(key, SharedChain) and key not in state.foreign:
                state.shared.discard(key)
        self._state, self._last_read = state, None

    def _count(self, applied: Delta[Key, Entry], state: TableState) -> None:
        """Update the counts; `state` is the one before the change."""
        put = [(key, _size(key, entry)) for key, entry in applied.puts.items()]
        replaced = [(key, self._present(key, state)) for key in (*applied.puts, *applied.drops)]
        for key in applied.drops:
            self._sizes.pop(key, None)
        self._sizes.update((key, size) for key, size in put if isinstance(key, Chain))
        written, removed = _by_table(put), _by_table(replaced)
        rules = {
            table: self.counts.rules.get(table, 0) + written.get(table, 0) - removed.get(table, 0)
            for table in dict.fromkeys([*self.counts.rules, *written])
        }
        self.counts = self.counts._replace(rules=rules, rules_last=written)

    def _present(self, key: Key, state: TableState) -> int:
        """Return the number of rules of an entry in the kernel."""
        return state.copies.get(key, 0) if isinstance(key, Rule) else self._sizes.get(key, 0)


_NO_RULES = {FILTER: 0, NAT: 0}


def _size(key: Key, entry: Entry) -> int:
    """Return the number of rules of an entry. A shared chain has none: its rules are entries."""
    if isinstance(key, Rule):
        return 1
    return len(entry) if isinstance(entry, tuple) else 0


def _by_table(sizes: Iterable[tuple[Key, int]]) -> dict[str, int]:
    """Return the sums by table: of filter and nat, and of others if they have rules."""
    sums = dict(_NO_RULES)
    for key, size in sizes:
        if size:
            sums[key.table] = sums.get(key.table, 0) + size
    return sums


def _without(delta: Delta[Key, Entry], rejected: Collection[Key]) -> Delta[Key, Entry]:
    if not rejected:
        return delta
    puts = {key: entry for key, entry in delta.puts.items() if key not in rejected}
    return Delta(puts, delta.drops.difference(rejected))


def _in_use(delta: Delta[Key, Entry], state: TableState) -> Rejections:
    """Return the chains that could not be dropped."""
    return {
        key: Rejected(
            f"cannot remove {key}: another program's rule is in it or jumps to it: {state.foreign[key]}",
            "delete that rule",
        )
        for key in delta.drops & state.foreign.keys()
    }
