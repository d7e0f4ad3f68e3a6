"""The tables of one family: read as entries, and changed by deltas."""

from collections.abc import Callable, Collection

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.xtables import rejections, saved, script
from ebpfproxy.backends.xtables.entries import Entry, Key, Rule, SharedChain
from ebpfproxy.backends.xtables.layout import Layout
from ebpfproxy.backends.xtables.rejections import Rejections
from ebpfproxy.backends.xtables.saved import Held
from ebpfproxy.backends.xtables.script import Script
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected
from ebpfproxy.model.address import Family

_ATTEMPTS = 6
_OF_PREVIOUS_STATE = ("-D ", "-N ", "-X ")


class Tables:
    """By one backend of the tools, in the network namespace of the calling thread."""

    def __init__(
        self, tool: Iptables, layout: Layout, prepare: Callable[[Family], None] = rejections.nothing
    ) -> None:
        """`prepare`: see `rejections.try_sorts`."""
        self._prepare = prepare
        self._layout = layout
        self._tool = tool
        self._block = script.block_for(tool.tool_backend)
        self._held: Held | None = None  # None: not known, so read it
        self._fresh: dict[Key, Entry] | None = None  # what was read, until the next change
        self._rejected: dict[Key, tuple[Entry, KernelError]] = {}  # what could not be put
        self._causes: frozenset[Key] = frozenset()  # what of it by itself, and not for what it leads to

    def read(self) -> dict[Key, Entry]:
        """What is there of ours. Raises KernelError."""
        self._held = None
        found, self._held = saved.parse(self._tool.family, self._tool.save(), self._layout)
        self._fresh = found
        return found

    def apply(self, delta: Delta[Key, Entry]) -> Rejections:
        """Bring it in; what was rejected, by key. Raises KernelError, and then nothing is known.

        Where a line is rejected, that may be for what another program has done since we have read: so
        everything is read again. What is rejected then is left out, with all that leads to it, and so on.
        """
        held, self._held = self._held or self._read_held(), None
        causes, rejected = self._presumed(delta)
        for attempt in range(_ATTEMPTS):
            left = _without(delta, rejected)
            lines = script.compose(left, held, self._layout, self._block)
            try:
                if lines:
                    self._tool.restore(lines.text)
                break
            except LinesRejected as failure:
                if attempt == _ATTEMPTS - 1:
                    raise
                held = self._read_held()
                delta = diff(self._fresh or {}, delta.puts, delta.puts.keys() | delta.drops)
                causes = causes | self._blamed(delta, lines, failure)
                rejected = rejections.with_dependents(causes, delta, self._fresh or {}, self._layout)
        self._note(left, held)
        self._causes = frozenset(causes)
        self._rejected = {key: (delta.puts[key], why) for key, why in rejected.items() if key in delta.puts}
        return rejected | _in_use(left, held)

    def _read_held(self) -> Held:
        self.read()
        assert self._held is not None
        return self._held

    def _blamed(self, delta: Delta[Key, Entry], lines: Script, failure: LinesRejected) -> Rejections:
        """What of that which is still to be put was rejected by itself, or is of a sort that would be."""
        at_fault = [n for n in failure.lines if not lines.line(n).startswith(_OF_PREVIOUS_STATE)]
        blamed = rejections.try_sorts(self._tool, delta.puts, self._prepare) if at_fault else {}
        for number in at_fault:
            owner = lines.owner(number)
            if owner and owner in delta.puts:
                blamed[owner] = rejections.not_taken(owner, failure, number)
        return blamed

    def _presumed(self, delta: Delta[Key, Entry]) -> tuple[Rejections, Rejections]:
        """What was rejected before, and is put again unchanged: what by itself, and what altogether.

        A proxier puts it again with every change. After a reading the sorts are tried once more, elsewhere.
        """
        again = {key: why for key, (entry, why) in self._rejected.items() if delta.puts.get(key) == entry}
        causes = {key: again[key] for key in self._causes if key in again}
        if causes and self._fresh is not None:
            tried = {key: delta.puts[key] for key in causes}
            causes = rejections.try_sorts(self._tool, tried, self._prepare)
            return causes, rejections.with_dependents(causes, delta, self._fresh, self._layout)
        if len(causes) < len(self._causes):  # what depended on the others is to be tried
            return causes, causes
        return causes, again

    def _note(self, applied: Delta[Key, Entry], held: Held) -> None:
        for key in applied.puts:
            if isinstance(key, Rule):
                held.copies[key] = 1
            elif isinstance(key, SharedChain):
                held.shared.add(key)
        for key in applied.drops:
            if isinstance(key, Rule):
                held.copies.pop(key, None)
            elif isinstance(key, SharedChain) and key not in held.foreign:
                held.shared.discard(key)
        self._held, self._fresh = held, None


def _without(delta: Delta[Key, Entry], rejected: Collection[Key]) -> Delta[Key, Entry]:
    if not rejected:
        return delta
    puts = {key: entry for key, entry in delta.puts.items() if key not in rejected}
    return Delta(puts, delta.drops.difference(rejected))


def _in_use(delta: Delta[Key, Entry], held: Held) -> Rejections:
    """Chains that could not be dropped."""
    return {
        key: Rejected(
            f"{key} cannot be removed: another program has a rule in it, or one to it: {held.foreign[key]}",
            "delete that rule",
        )
        for key in delta.drops & held.foreign.keys()
    }
