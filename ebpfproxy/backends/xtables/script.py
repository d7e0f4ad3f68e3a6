"""From a delta to what iptables-restore reads. Pure.

Puts come into force before drops do, and no packet meets a Service half written:

- the table filter first, which rejects and drops what the table nat is about to lead nowhere; then nat; what
  filter drops comes last, when nat leads to the endpoints again;
- in a table, chains before the rules that lead to them, and all of a change at once: a COMMIT for each table.
  Only a change of many chains is cut into pieces for iptables-nft, leaves first, since no packet reaches them
  before the roots are written (see `BLOCK`).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.entries import (
    FILTER,
    MANGLE,
    NAT,
    Chain,
    Entry,
    Key,
    Rule,
    RulePosition,
    SharedChain,
)
from ebpfproxy.backends.xtables.layout import Layout
from ebpfproxy.backends.xtables.saved import Held
from ebpfproxy.linux.xtables.iptables import ToolBackend

BLOCK = 300
"""How many chains iptables-nft is given up to a COMMIT. It keeps those of a transaction in a list, and walks
along it for each line: 110 000 chains at once take it minutes, in pieces of this size some 20 s (measured
with 1.8.9). With smaller pieces the kernel's own work for each counts more."""

_HEIGHTS = {
    names.ENDPOINT: 1,
    names.CLUSTER: 2,
    names.LOCAL: 2,
    names.EXTERNAL: 3,
    "KUBE-XLB-": 3,
    names.SOURCES: 4,
    names.NODE_PORTS: 5,
    names.SERVICES: 6,
    names.POSTROUTING: 6,
}
"""By the names of chains, or how they begin: each leads to lower ones only, and those of others to none.

KUBE-POSTROUTING is put with KUBE-SERVICES, since what another mode's rules send is masqueraded there, too.
"""


class Script:
    """The lines of one family, and whose each is."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._owners: list[Key | None] = []

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def text(self) -> str:
        return "\n".join([*self._lines, ""])

    def line(self, number: int) -> str:
        """Numbers begin with 1."""
        return self._lines[number - 1]

    def owner(self, number: int) -> Key | None:
        """None for a line of no table, as a COMMIT."""
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
    """What comes into force at once."""

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

    def put(self, key: Key, entry: Entry, held: Held) -> None:
        if isinstance(key, Rule):
            assert isinstance(entry, RulePosition)
            self.rules.append((key, entry))
        elif isinstance(key, Chain):
            assert isinstance(entry, tuple)
            self.chains.append((key, entry))
        elif key not in held.shared:
            self.shared.append(key)

    def drop(self, key: Key, held: Held) -> None:
        if isinstance(key, Rule):
            if key in held.copies:
                self.dropped_rules.append(key)
        elif isinstance(key, Chain):
            self.dropped_chains.append(key)
        elif key in held.shared and key not in held.foreign:
            self.dropped_shared.append(key)


def block_for(tool_backend: ToolBackend) -> int | None:
    """What `compose` is to be given: iptables-legacy copies the whole table for each COMMIT."""
    return None if tool_backend is ToolBackend.LEGACY else BLOCK


def compose(delta: Delta[Key, Entry], held: Held, layout: Layout, block: int | None) -> Script:
    """What brings `delta` into a kernel that has `held` beside its entries. Empty for nothing to do.

    `block`: how many chains there may be up to a COMMIT, None for any number. Chains that rules of another
    program else lead to are emptied, but not dropped; shared ones with such rules stay as they are.
    """
    first, nat, mangle, last = sections = [_Section(table) for table in (FILTER, NAT, MANGLE, FILTER)]
    putting, dropping = {FILTER: first, NAT: nat, MANGLE: mangle}, {FILTER: last, NAT: nat, MANGLE: mangle}
    for key, entry in delta.puts.items():
        putting[key.table].put(key, entry, held)
    for key in delta.drops:
        dropping[key.table].drop(key, held)
    script = Script()
    for section in itertools.chain.from_iterable(_cut(each, block) for each in sections):
        if section:
            script.add(f"*{section.table}")
            _write(section, held, layout, script)
            script.add("COMMIT")
    return script


def _cut(section: _Section, block: int | None) -> Iterator[_Section]:
    """In pieces of `block` chains: leaves first to put, roots first to drop, and in the one in the middle
    what leads to them.

    iptables-legacy, which is given all at once, finds chains the sooner the later in the alphabet they were
    that it knew before: five seconds for 110 000 of them instead of nine. iptables-nft in turn sorts
    what the kernel has, from the order in which it was made, by a recursion that is as deep as there are
    chains where that order is the alphabet's: with some ten thousand iptables-nft-save would crash. Names are
    hashes, so read backwards they are in no order at all.
    """
    if block is None:
        section.chains.sort(key=lambda each: each[0].name, reverse=True)
        section.dropped_chains.sort(key=lambda each: each.name, reverse=True)
        yield section
        return
    section.chains.sort(key=lambda each: (_height(each[0]), each[0].name[::-1]))
    section.dropped_chains.sort(key=_height, reverse=True)
    middle = max(len(section.chains) - block, 0)
    for at in range(0, middle, block):
        yield _Section(section.table, section.chains[at : min(at + block, middle)])
    rest = section.dropped_chains[block:]
    yield dataclasses.replace(
        section, chains=section.chains[middle:], dropped_chains=section.dropped_chains[:block]
    )
    for at in range(0, len(rest), block):
        yield _Section(section.table, dropped_chains=rest[at : at + block])


def _height(chain: Chain) -> int:
    kind = chain.name[: chain.name.rfind("-") + 1]
    return _HEIGHTS.get(kind) or _HEIGHTS.get(chain.name, 0)


def _write(section: _Section, held: Held, layout: Layout, script: Script) -> None:
    for chain, _ in section.chains:
        script.add(f":{chain.name} - [0:0]", chain)  # makes it, or empties it
    for shared in section.shared:
        script.add(f"-N {shared.name}", shared)
    for chain, texts in section.chains:
        script.append_to(chain, texts)
    _write_rules(section.rules, held, layout, script)
    for rule in section.dropped_rules:
        _remove_copies(rule, held, script)
    for chain in section.dropped_chains:
        script.add(f":{chain.name} - [0:0]", chain)  # so that none leads to another any more
    doomed: list[Chain | SharedChain] = [*section.dropped_chains, *section.dropped_shared]
    for key in doomed:
        if key not in held.foreign:
            script.add(f"-X {key.name}", key)


def _write_rules(
    rules: Iterable[tuple[Rule, RulePosition]], held: Held, layout: Layout, script: Script
) -> None:
    """All but the last ones are prepended: so none comes behind those, wherever they stand."""
    by_place: dict[RulePosition, list[Rule]] = {place: [] for place in RulePosition}
    for rule, place in rules:
        _remove_copies(rule, held, script)
        by_place[place].append(rule)
    for rule in (
        *by_place[RulePosition.ANYWHERE][::-1],
        *sorted(by_place[RulePosition.FIRST], key=layout.prepend_order),
    ):
        script.add(f"-I {rule.chain} {rule.text}", rule)
    for rule in by_place[RulePosition.LAST]:
        script.add(f"-A {rule.chain} {rule.text}", rule)


def _remove_copies(rule: Rule, held: Held, script: Script) -> None:
    for _ in range(held.copies.get(rule, 0)):
        script.add(f"-D {rule.chain} {rule.text}", rule)
