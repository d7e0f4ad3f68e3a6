"""Converts a delta into the input of iptables-restore. Pure.

Puts take effect before drops, and no packet meets a partly written Service:

- Puts in the table filter are first: they reject and drop packets that nat is about to stop translating. Then
  follows the table nat. Drops in filter are last, when nat translates to endpoints again.
- Within a table, chains come before the rules that jump to them, and a complete change has one COMMIT. Only
  for iptables-nft, a change of many chains is cut into pieces, leaves first. No packet reaches them before
  the roots are written (see `BLOCK`).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.iptables import chains
from ebpfproxy.backends.iptables.entries import (
    FILTER,
    MANGLE,
    NAT,
    Chain,
    Entry,
    Key,
    Layout,
    Rule,
    RulePosition,
    SharedChain,
    TableState,
)
from ebpfproxy.linux.xtables.iptables import ToolBackend

BLOCK = 300
"""The number of chains for each COMMIT of iptables-nft.

The tool keeps the chains of a transaction in a list, which it walks for each line. 110 000 chains at once
take minutes; in pieces of this size they take about 20 s (measured with 1.8.9). With smaller pieces, the
kernel's work for each transaction dominates.
"""

_HEIGHTS = {
    chains.ENDPOINT: 1,
    chains.CLUSTER: 2,
    chains.LOCAL: 2,
    chains.EXTERNAL: 3,
    "KUBE-XLB-": 3,
    chains.SOURCES: 4,
    chains.NODE_PORTS: 5,
    chains.SERVICES: 6,
    chains.POSTROUTING: 6,
}
"""The heights of chains, by name or prefix. Chains only jump to lower ones; other chains jump to none.

KUBE-POSTROUTING is written with KUBE-SERVICES, since it also masquerades packets of another mode's rules.
"""


class Script:
    """The lines for one family, and the entry that each line belongs to."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._owners: list[Key | None] = []

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def text(self) -> str:
        return "\n".join([*self._lines, ""])

    def line(self, number: int) -> str:
        """Return a line. Numbers begin with 1."""
        return self._lines[number - 1]

    def owner(self, number: int) -> Key | None:
        """Return the key that a line belongs to; None for a line of no entry, for example COMMIT."""
        return self._owners[number - 1]

    def add(self, line: str, owner: Key | None = None) -> None:
        self._lines.append(line)
        self._owners.append(owner)

    def append_to(self, chain: Chain, texts: tuple[str, ...]) -> None:
        start = f"-A {chain.name} "
        self._lines += [start + text for text in texts]
        self._owners += [chain] * len(texts)


@dataclasses.dataclass(slots=True)
class _Section:
    """What takes effect with one COMMIT."""

    table: str
    chains: list[tuple[Chain, tuple[str, ...]]] = dataclasses.field(default_factory=list)
    shared: list[SharedChain] = dataclasses.field(default_factory=list)
    rules: list[tuple[Rule, RulePosition]] = dataclasses.field(default_factory=list)
    dropped_rules: list[Rule] = dataclasses.field(default_factory=list)
    dropped_chains: list[Chain] = dataclasses.field(default_factory=list)
    dropped_shared: list[SharedChain] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        put = self.chains or self.shared or self.rules
        return bool(put or self.dropped_rules or self.dropped_chains or self.dropped_shared)

    def put(self, key: Key, entry: Entry, state: TableState) -> None:
        if isinstance(key, Rule):
            assert isinstance(entry, RulePosition)
            self.rules.append((key, entry))
        elif isinstance(key, Chain):
            assert isinstance(entry, tuple)
            self.chains.append((key, entry))
        elif key not in state.shared:
            self.shared.append(key)

    def drop(self, key: Key, state: TableState) -> None:
        if isinstance(key, Rule):
            if key in state.copies:
                self.dropped_rules.append(key)
        elif isinstance(key, Chain):
            self.dropped_chains.append(key)
        elif key in state.shared and key not in state.foreign:
            self.dropped_shared.append(key)


def block_for(tool_backend: ToolBackend) -> int | None:
    """Return the `block` for `compose`: no limit for iptables-legacy, which copies the complete table at each
    COMMIT.

    >>> block_for(ToolBackend.LEGACY), block_for(ToolBackend.NFT)
    (None, 300)
    """
    return None if tool_backend is ToolBackend.LEGACY else BLOCK


def compose(delta: Delta[Key, Entry], state: TableState, layout: Layout, block: int | None) -> Script:
    """Return the script that applies `delta` to a kernel with the given state. Empty if there is nothing to
    do.

    `block`: the maximum number of chains for one COMMIT, None for no limit. Chains that a rule of another
    program jumps to are emptied, but not removed. Shared chains with such rules stay unchanged.
    """
    first, nat, mangle, last = sections = [_Section(table) for table in (FILTER, NAT, MANGLE, FILTER)]
    put_sections = {FILTER: first, NAT: nat, MANGLE: mangle}
    drop_sections = {FILTER: last, NAT: nat, MANGLE: mangle}
    for key, entry in delta.puts.items():
        put_sections[key.table].put(key, entry, state)
    for key in delta.drops:
        drop_sections[key.table].drop(key, state)
    script = Script()
    for section in itertools.chain.from_iterable(_cut(each, block) for each in sections):
        if section:
            script.add(f"*{section.table}")
            _write(section, state, layout, script)
            script.add("COMMIT")
    return script


def _cut(section: _Section, block: int | None) -> Iterator[_Section]:
    """Cut a section into pieces of `block` chains. Puts start with leaves, drops start with roots, and the
    piece in the middle has the rules that jump to them.

    iptables-legacy gets all chains at once, in reverse alphabetical order. It searches the chains that it
    already has, which is faster if these are later in the alphabet: 110 000 chains take five instead of nine
    seconds.

    iptables-nft sorts the kernel's chains, in their order of creation, by a recursion. If that order is
    alphabetical, the recursion is as deep as the number of chains, and iptables-nft-save crashes at some ten
    thousand. Names end with a hash, so chains sorted by reversed name are in no alphabetical order.
    """
    if block is None:
        section.chains.sort(key=lambda each: each[0].name, reverse=True)
        section.dropped_chains.sort(key=lambda each: each.name, reverse=True)
        yield section
        return
    section.chains.sort(key=lambda each: (_height(each[0]), each[0].name[::-1]))
    section.dropped_chains.sort(key=_height, reverse=True)
    middle = max(len(section.chains) - block, 0)
    for start in range(0, middle, block):
        yield _Section(section.table, section.chains[start : min(start + block, middle)])
    rest = section.dropped_chains[block:]
    yield dataclasses.replace(
        section, chains=section.chains[middle:], dropped_chains=section.dropped_chains[:block]
    )
    for start in range(0, len(rest), block):
        yield _Section(section.table, dropped_chains=rest[start : start + block])


def _height(chain: Chain) -> int:
    kind = chain.name[: chain.name.rfind("-") + 1]
    return _HEIGHTS.get(kind) or _HEIGHTS.get(chain.name, 0)


def _write(section: _Section, state: TableState, layout: Layout, script: Script) -> None:
    for chain, _ in section.chains:
        script.add(f":{chain.name} - [0:0]", chain)  # creates or empties the chain
    for shared in section.shared:
        script.add(f"-N {shared.name}", shared)
    for chain, texts in section.chains:
        script.append_to(chain, texts)
    _write_rules(section.rules, state, layout, script)
    for rule in section.dropped_rules:
        _remove_copies(rule, state, script)
    for chain in section.dropped_chains:
        script.add(f":{chain.name} - [0:0]", chain)  # empty all first: then no chain jumps to another
    dropped: list[Chain | SharedChain] = [*section.dropped_chains, *section.dropped_shared]
    for key in dropped:
        if key not in state.foreign:
            script.add(f"-X {key.name}", key)


def _write_rules(
    rules: Iterable[tuple[Rule, RulePosition]], state: TableState, layout: Layout, script: Script
) -> None:
    """Prepend all rules but those with position LAST. So no rule comes after these, wherever they are."""
    by_position: dict[RulePosition, list[Rule]] = {position: [] for position in RulePosition}
    for rule, position in rules:
        _remove_copies(rule, state, script)
        by_position[position].append(rule)
    for rule in (
        *by_position[RulePosition.ANYWHERE][::-1],
        *sorted(by_position[RulePosition.FIRST], key=layout.prepend_order),
    ):
        script.add(f"-I {rule.chain} {rule.text}", rule)
    for rule in by_position[RulePosition.LAST]:
        script.add(f"-A {rule.chain} {rule.text}", rule)


def _remove_copies(rule: Rule, state: TableState, script: Script) -> None:
    for _ in range(state.copies.get(rule, 0)):
        script.add(f"-D {rule.chain} {rule.text}", rule)
