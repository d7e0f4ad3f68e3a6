"""Which of many entries it is that the kernel, or the tool, does not take.

iptables-legacy hands a whole table to the kernel, which does not tell what in it is wrong; a tool that stops
at one line says nothing of the lines behind it. What is not taken is nearly always a match or a target that
is missing. So one rule of each sort is tried by itself, where no traffic is: in a network namespace made for
it.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.xtables.entries import Chain, Entry, Key, Rule
from ebpfproxy.backends.xtables.layout import Layout
from ebpfproxy.backends.xtables.saved import leads_to
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.xtables.iptables import Iptables, LinesRejected
from ebpfproxy.model.address import Family

_TRIED = "KUBE-SEP-TRIED"
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')

Rejections = dict[Key, KernelError]


def nothing(family: Family) -> None:
    """For rules that refer to nothing but chains."""


def try_sorts(
    tool: Iptables, entries: Mapping[Key, Entry], prepare: Callable[[Family], None] = nothing
) -> Rejections:
    """Those of the entries that have a rule of a sort that is rejected; none where that cannot be tried.

    `prepare`: what makes the things that rules refer to, where they are tried.
    """
    sorts: dict[str, tuple[str, str]] = {}
    sorts_of: dict[Key, set[str]] = {}
    for key, entry in entries.items():
        for text in _rules(key, entry):
            sort = f"{key.table} {sort_of(text)}"
            sorts.setdefault(sort, (key.table, text))
            sorts_of.setdefault(key, set()).add(sort)
    failures: dict[str, LinesRejected] = {}
    with contextlib.suppress(KernelError), netns.throw_away():
        prepare(tool.family)
        for sort, (table, text) in sorts.items():
            try:
                tool.restore(_alone(table, text))
            except LinesRejected as failure:
                failures[sort] = failure
    return {
        key: not_taken(key, failures[sort], min(failures[sort].lines))
        for key, own in sorts_of.items()
        for sort in sorted(own & failures.keys())[:1]
    }


def not_taken(key: Key, failure: LinesRejected, line: int) -> Rejected:
    """What to tell of an entry whose line was rejected."""
    return Rejected(f"{key} is not taken: {failure.lines[line]}", failure.hint)


def sort_of(text: str) -> str:
    """The matches, options and target of a rule, without their values.

    >>> sort_of('-d 10.96.0.1/32 -p sctp -m comment --comment "a -m b" -m sctp --dport 80 -j KUBE-SVC-X')
    '-d -p sctp -m comment --comment -m sctp --dport -j KUBE-'
    """
    words = _QUOTED.sub("", text).split()
    kept = []
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith("-") or word == "!":
            kept.append(word)
        elif before in ("-p", "-m", "-j"):
            kept.append("KUBE-" if word.startswith("KUBE-") else word)
    return " ".join(kept)


def with_dependents(
    rejected: Rejections, delta: Delta[Key, Entry], actual: Mapping[Key, Entry], layout: Layout
) -> Rejections:
    """And what cannot be without them: puts that lead to a chain that will not be there, and drops of chains
    that something which stays leads to. `actual` is what the kernel has now."""
    rejected = dict(rejected)
    while True:
        final = {key: entry for key, entry in actual.items() if key not in delta.drops or key in rejected}
        final.update((key, entry) for key, entry in delta.puts.items() if key not in rejected)
        more = {
            key: Rejected(f"{key} leads to {missing}, which is rejected")
            for key, entry in delta.puts.items()
            if key not in rejected
            for missing in _missing(key, entry, final, layout)
        }
        kept = {target for key, entry in final.items() for target in _targets(key, entry, layout)}
        more.update(
            (key, Rejected(f"{key} is still in use by what could not be replaced"))
            for key in delta.drops & kept
            if key not in rejected
        )
        if not more:
            return rejected
        rejected.update(more)


def _missing(key: Key, entry: Entry, present: Mapping[Key, Entry], layout: Layout) -> Iterator[Key]:
    return (target for target in _targets(key, entry, layout) if target not in present)


def _targets(key: Key, entry: Entry, layout: Layout) -> Iterator[Key]:
    """The chains of ours that an entry leads to."""
    for text in _rules(key, entry):
        target = layout.chain_key(key.family, key.table, leads_to(text))
        if target:
            yield target


def _rules(key: Key, entry: Entry) -> Iterable[str]:
    if isinstance(key, Rule):
        return (key.text,)
    return entry if isinstance(key, Chain) and isinstance(entry, tuple) else ()


def _alone(table: str, text: str) -> str:
    target = leads_to(text)
    chains = [_TRIED, target] if target.startswith("KUBE-") else [_TRIED]
    declared = "".join(f":{name} - [0:0]\n" for name in chains)
    return f"*{table}\n{declared}-A {_TRIED} {text}\nCOMMIT\n"
