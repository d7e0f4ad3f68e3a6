"""Finds the entries of a delta that the kernel or the tool rejects.

iptables-legacy passes complete tables to the kernel, which does not report which part is wrong. A tool that
stops at one line reports nothing about the lines after it. The cause is nearly always a missing match or
target. So one rule of each shape is tried separately, in a temporary network namespace without traffic.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.xtables.entries import Chain, Entry, Key, Rule
from ebpfproxy.backends.xtables.layout import Layout
from ebpfproxy.backends.xtables.saved import target_chain
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected
from ebpfproxy.model.address import Family

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
