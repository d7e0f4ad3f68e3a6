"""Run modes at the same time, each in a lab of its own, and measure them in turns."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from ebpfproxy.bench import modes
from ebpfproxy.lab import Agent, Lab, PodNetwork


class Progress(Protocol):
    """Reports the step that begins. `done`: the part of the run before it, 0 to 1; None if unknown."""

    def __call__(self, text: str, done: float | None = None, /) -> None: ...


def part_of(progress: Progress, index: int, count: int) -> Progress:
    """Return the progress of one of `count` equal parts of a run.

    >>> part_of(print, 1, 4)("round 2 of 2", 0.5)
    round 2 of 2 0.375
    """

    def report(text: str, done: float | None = None, /) -> None:
        progress(text, None if done is None else (index + done) / count)

    return report


PATIENCE = 600.0
"""The timeout in seconds for a first sync, however large."""

_NO_READ_BACK = "--sync-period=1h"
"""Keeps agents from reading back the kernel while another one is measured: nftables takes seconds for it."""

T = TypeVar("T")
P = TypeVar("P")
S = TypeVar("S")


class Side(NamedTuple, Generic[T]):
    """A mode, its lab, the benchmark's testbed in it, and its agents. Mode `none` has no agents."""

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
    flags: Sequence[str] = (),
    pods: PodNetwork | None = None,
) -> Iterator[list[Side[T]]]:
    """Create a lab for each mode, fill it with `build`, including manifests, and start agents with `flags`.

    Each mode needs its own lab: after a netfilter mode has been active, the kernel tracks connections as long
    as the network namespace exists, in any mode. Raises AgentFailed.
    """
    with contextlib.ExitStack() as labs:
        sides = []
        for number, name in enumerate(names, 1):
            lab = labs.enter_context(Lab(f"bench-{name}", number, pods))
            testbed = build(lab)
            progress(f"{name}: starting")
            agents = start(lab, name, _NO_READ_BACK, *flags)
            for agent in agents:
                agent.await_sync(timeout=PATIENCE)
            sides.append(Side(name, lab, testbed, agents))
        yield sides


def start(lab: Lab, name: str, *flags: str) -> list[Agent]:
    """Start an agent in this mode on each node of the lab, with the manifests in the lab's folder.

    `flags` come last and override others. Returns at once.
    """
    if name == modes.NONE:
        return []
    folder = lab.folder / "manifests"
    return [node.agent(folder, *modes.flags(name), *flags, wait=0) for node in lab.nodes]


def turns(
    sides: Sequence[S], rounds: int, parts: Sequence[P], progress: Progress
) -> Iterator[tuple[int, P, S]]:
    """Yield the order of measurements: the number of the turn, the part and the side.

    For each part of each round, all sides are measured in succession, and each time another side begins.
    Thus figures of the same turn are comparable, even if the speed of the machine changes.
    """
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}", number / rounds)
        for index, part in enumerate(parts):
            for side in rotated(sides, number + index):
                yield number * len(parts) + index, part, side


def rotated(items: Sequence[P], by: int) -> list[P]:
    """Return the items, rotated to the left.

    >>> rotated("abc", 4)
    ['b', 'c', 'a']
    """
    first = by % len(items)
    return [*items[first:], *items[:first]]
