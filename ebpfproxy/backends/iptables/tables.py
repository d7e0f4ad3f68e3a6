"""The iptables tables of one family: reads and changes them, and finds rejected entries.

iptables-legacy passes complete tables to the kernel, which does not report which part is wrong. A tool that
stops at one line reports nothing about the lines after it. The cause is nearly always a missing match or
target. So one rule of each shape is tried separately, in a temporary network namespace without traffic.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.iptables import entries, script
from ebpfproxy.backends.iptables.entries import (
    FILTER,
    NAT,
    Chain,
    Entry,
    Key,
    Layout,
    Rule,
    SharedChain,
    TableState,
    target_chain,
)
from ebpfproxy.backends.iptables.script import Script
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import IptablesCounts

_TRIAL_CHAIN = "KUBE-SEP-TRIED"
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')

Rejections = dict[Key, KernelError]


def prepare_nothing(family: Family) -> None:
    """Prepare nothing, for rules that refer only to chains."""


def try_rule_shapes(
    tool: Iptables, entries: Mapping[Key, Entry], prepare: Callable[[Family], None] = prepare_nothing
) -> Rejections:
    """Return the entries that contain a rule of a rejected shape; empty if the shapes cannot be tried.

    `prepare` creates the objects that the rules refer to, in the network namespace where they are tried.
    """
    shapes: dict[str, tuple[str, str]] = {}
    shapes_of: dict[Key, set[str]] = {}
    for key, entry in entries.items():
        for text in _rules(key, entry):
            shape = f"{key.table} {rule_shape(text)}"
            shapes.setdefault(shape, (key.table, text))
            shapes_of.setdefault(key, set()).add(shape)
    failures: dict[str, LinesRejected] = {}
    with contextlib.suppress(KernelError), netns.throw_away():
        prepare(tool.family)
        for shape, (table, text) in shapes.items():
            try:
                tool.restore(_script_of(table, text))
            except LinesRejected as failure:
                failures[shape] = failure
    return {
        key: rejection(key, failures[shape], min(failures[shape].lines))
        for key, entry_shapes in shapes_of.items()
        for shape in sorted(entry_shapes & failures.keys())[:1]
    }


def rejection(key: Key, failure: LinesRejected, line: int) -> Rejected:
    """Return the error for an entry whose line was rejected."""
    return Rejected(f"cannot write {key}: {failure.lines[line]}", failure.hint)


def rule_shape(text: str) -> str:
    """Return the shape of a rule: its matches, options and target without their values.

    >>> rule_shape('-d 10.96.0.1/32 -p sctp -m comment --comment "a -m b" -m sctp --dport 80 -j KUBE-SVC-X')
    '-d -p sctp -m comment --comment -m sctp --dport -j KUBE-'
    """
    words = _QUOTED.sub("", text).split()
    parts = []
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-") or word == "!":
            parts.append(word)
        elif before in ("-p", "-m", "-j"):
            parts.append("KUBE-" if word.startswith("KUBE-") else word)
    return " ".join(parts)


def with_dependents(
    rejected: Rejections, delta: Delta[Key, Entry], actual: Mapping[Key, Entry], layout: Layout
) -> Rejections:
    """Add the entries that depend on the rejected ones, and return all of them.

    These are puts that jump to a chain that will not exist, and drops of chains that a remaining rule jumps
    to. `actual` has the current entries of the kernel.
    """
    rejected = dict(rejected)
    while True:
        final = {key: entry for key, entry in actual.items() if key not in delta.drops or key in rejected}
        final.update((key, entry) for key, entry in delta.puts.items() if key not in rejected)
        more = {
            key: Rejected(f"cannot write {key}: {missing}, which it jumps to, was rejected")
            for key, entry in delta.puts.items()
            if key not in rejected
            for missing in _missing(key, entry, final, layout)
        }
        referenced = {target for key, entry in final.items() for target in _targets(key, entry, layout)}
        more.update(
            (key, Rejected(f"cannot remove {key}: an entry that could not be replaced jumps to it"))
            for key in delta.drops & referenced
            if key not in rejected
        )
        if not more:
            return rejected
        rejected.update(more)


def _missing(key: Key, entry: Entry, present: Mapping[Key, Entry], layout: Layout) -> Iterator[Key]:
    return (target for target in _targets(key, entry, layout) if target not in present)


def _targets(key: Key, entry: Entry, layout: Layout) -> Iterator[Key]:
    """Yield the own chains that an entry jumps to."""
    for text in _rules(key, entry):
        target = layout.chain_key(key.family, key.table, target_chain(text))
        if target:
            yield target


def _rules(key: Key, entry: Entry) -> Iterable[str]:
    if isinstance(key, Rule):
        return (key.text,)
    return entry if isinstance(key, Chain) and isinstance(entry, tuple) else ()


def _script_of(table: str, text: str) -> str:
    target = target_chain(text)
    chains = [_TRIAL_CHAIN, target] if target.startswith("KUBE-") else [_TRIAL_CHAIN]
    declared = "".join(f":{name} - [0:0]\n" for name in chains)
    return f"*{table}\n{declared}-A {_TRIAL_CHAIN} {text}\nCOMMIT\n"


_ATTEMPTS = 6
_STATE_DEPENDENT = ("-D ", "-N ", "-X ")


class Tables:
    """The tables of one family with one iptables backend, in the network namespace of the calling thread."""

    def __init__(
        self, tool: Iptables, layout: Layout, prepare: Callable[[Family], None] = prepare_nothing
    ) -> None:
        """`prepare`: see `try_rule_shapes`."""
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
        found, self._state = entries.parse(self._tool.family, self._tool.save(), self._layout)
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
                rejected = with_dependents(causes, delta, self._last_read or {}, self._layout)
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
        blamed = try_rule_shapes(self._tool, delta.puts, self._prepare) if at_fault else {}
        for number in at_fault:
            owner = lines.owner(number)
            if owner and owner in delta.puts:
                blamed[owner] = rejection(owner, failure, number)
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
            causes = try_rule_shapes(self._tool, tried, self._prepare)
            return causes, with_dependents(causes, delta, self._last_read, self._layout)
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
