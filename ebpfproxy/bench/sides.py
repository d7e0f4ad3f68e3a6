"""Modes side by side, each at work in a lab of its own, and whose turn it is."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from ebpfproxy.bench import modes
from ebpfproxy.lab import Agent, Lab, PodNetwork

Progress = Callable[[str], None]

PATIENCE = 600.0
"""Seconds for a first sync, however large."""

_UNDISTURBED = "--sync-period=1h"
"""No agent reads back the kernel while another one is measured: that takes nftables seconds."""

T = TypeVar("T")
P = TypeVar("P")
S = TypeVar("S")


class Side(NamedTuple, Generic[T]):
    """A mode, its lab, what the benchmark built there, and its agents: of the mode `none` there are none."""

    mode: str
    lab: Lab
    testbed: T
    agents: list[Agent]


@contextlib.contextmanager
def side_by_side(
    names: Sequence[str],
    build: Callable[[Lab], T],
    progress: Progress,
    *,
    flags: Callable[[T], Sequence[str]] = lambda testbed: (),
    pods: PodNetwork | None = None,
) -> Iterator[list[Side[T]]]:
    """A lab for each mode, which `build` fills, manifests included; then agents start with `flags`.

    A lab of its own, since a node remembers: once netfilter's modes have served there, connections are
    tracked for as long as its network namespace is there, whichever mode serves by then. Raises AgentFailed.
    """
    with contextlib.ExitStack() as labs:
        sides = []
        for number, name in enumerate(names, 1):
            lab = labs.enter_context(Lab(f"bench-{name}", number, pods))
            testbed = build(lab)
            progress(f"{name}: starting")
            agents = start(lab, name, _UNDISTURBED, *flags(testbed))
            for agent in agents:
                agent.await_sync(timeout=PATIENCE)
            sides.append(Side(name, lab, testbed, agents))
        yield sides


def start(lab: Lab, name: str, *flags: str) -> list[Agent]:
    """An agent in that mode on each of the lab's nodes, for the manifests in the lab's folder.

    `flags` come last, and win. Returns at once.
    """
    if name == modes.NONE:
        return []
    folder = lab.folder / "manifests"
    return [node.agent(folder, *modes.flags(name), *flags, wait=0) for node in lab.nodes]


def turns(
    sides: Sequence[S], rounds: int, parts: Sequence[P], progress: Progress
) -> Iterator[tuple[int, P, S]]:
    """Who is measured next: the number of its turn, what of it, and the side.

    Sides take turns at each part of each round, since a machine drifts, and another one begins each time.
    So figures of the same turn and part can be compared.
    """
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for index, part in enumerate(parts):
            for side in rotated(sides, number + index):
                yield number * len(parts) + index, part, side


def rotated(items: Sequence[P], by: int) -> list[P]:
    """
    >>> rotated("abc", 4)
    ['b', 'c', 'a']
    """
    first = by % len(items)
    return [*items[first:], *items[:first]]
