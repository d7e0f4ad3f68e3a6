"""One history after the other, in all modes at once. After each step all clients dial all frontends."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from ebpfproxy.model.address import format_address
from tests.kernel.clients import REFUSED, SILENT, UDP
from tests.kernel.differential.dialers import Dial, Kept
from tests.kernel.differential.expected import Case, World, by_reference, of_kept, outcomes
from tests.kernel.differential.history import NOTHING, Change, Step, advance
from tests.kernel.differential.subject import Subject
from tests.support.reference import SOURCES, Reached

Adapted = Callable[[str, Case, Reached], Reached]
"""Adapts the reference's outcome of a case to the known differences of a mode."""

_ROUNDS = 3
_MOST_KEPT = 4
_MOST_SHOWN = 20


class Course:
    """The state that all `subjects` are in. `steps`: how many steps were run; `compared`: how many outcomes
    were compared, of all subjects."""

    def __init__(self, subjects: Sequence[Subject], adapted: Adapted) -> None:
        self.steps = 0
        self._runs = [_Run(subject, adapted) for subject in subjects]
        self._world = World(NOTHING)

    @property
    def compared(self) -> int:
        return sum(run.compared for run in self._runs)

    def run(self, history: Iterable[Step]) -> None:
        """Raises AssertionError with a line for each wrong outcome."""
        for step in history:
            self.steps += 1
            change = advance(self._world.state, step)
            self._world = World(change.state, self._world)
            under_way = [run.begin(change, self._world) for run in self._runs]
            wrong = list(dict.fromkeys(line for each in under_way for line in each.result()))
            assert not wrong, "\n".join(["", *wrong[:_MOST_SHOWN]])
        verifications = {run.subject.name: run.subject.verify() for run in self._runs}
        for name, done in verifications.items():
            assert done.result()[:2] == (0, 0), f"{name}: the kernel does not hold what was written"


class _Asked(NamedTuple):
    """A case, and all outcomes that its client may get."""

    case: Case
    allowed: frozenset[str]

    @property
    def dial(self) -> Dial:
        return Dial(self.case.protocol, format_address(self.case.address), self.case.port)

    @property
    def is_answered(self) -> bool:
        return not self.allowed & {SILENT, REFUSED}

    @property
    def times(self) -> int:
        """How often the case is dialed: less often if its outcome is certain."""
        return min(len(self.allowed) + 1, _ROUNDS) if self.is_answered else 1

    def wrong(self, outcome: str) -> Iterator[str]:
        if outcome not in self.allowed:
            yield f"{self.case}: {outcome}, not {' or '.join(sorted(self.allowed))}"


class _Run:
    """The run of one subject, in its control thread."""

    def __init__(self, subject: Subject, adapted: Adapted) -> None:
        self.subject = subject
        self.compared = 0
        self._adapted = adapted
        self._dialers = subject.dialers
        self._kept: dict[str, list[tuple[Case, str]]] = {source: [] for source in SOURCES}

    def begin(self, change: Change, world: World) -> Future[list[str]]:
        return self.subject.submit(
            lambda: [f"{self.subject.name}, {line}" for line in self._step(change, world)]
        )

    def _step(self, change: Change, world: World) -> Iterator[str]:
        self.subject.apply(change)
        asked: dict[str, list[_Asked]] = {source: [] for source in SOURCES}
        for case in world.cases:
            asked[case.source].append(_Asked(case, outcomes(case, self._reached(case))))
        yield from self._use_kept_sockets(world)
        yield from self._dial(asked)
        self._keep(asked)

    def _reached(self, case: Case) -> Reached:
        return self._adapted(self.subject.name, case, by_reference(case))

    def _use_kept_sockets(self, world: World) -> Iterator[str]:
        """Exchange again by the sockets that were kept."""
        wanted: dict[str, list[tuple[Case, Kept]]] = {}
        for source, kept in self._kept.items():
            wanted[source] = []
            for before, who in kept:
                promised = of_kept(world, before, who, self._reached(world.again(before)))
                if promised:
                    dial = _Asked(before, frozenset()).dial
                    wanted[source].append((before, Kept(dial, *promised)))
            self._dialers[source].exchange_again([each for _, each in wanted[source]])
        for source, cases in wanted.items():
            for (case, each), outcome in zip(cases, self._dialers[source].result(), strict=True):
                self.compared += 1
                if outcome not in each.outcomes:
                    yield f"{case}, by a kept socket: {outcome}, not {' or '.join(sorted(each.outcomes))}"

    def _dial(self, asked: dict[str, list[_Asked]]) -> Iterator[str]:
        plans: dict[str, tuple[list[list[_Asked]], list[_Asked]]] = {}
        for source, cases in asked.items():
            rounds = [[each for each in cases if each.times > number] for number in range(_ROUNDS)]
            sticky = _sticky(cases)
            plans[source] = rounds, sticky
            dials = [[each.dial for each in some] for some in (*rounds, *[sticky] * _ROUNDS)]
            self._dialers[source].dial(dials)
        for source, (rounds, sticky) in plans.items():
            outcome = iter(self._dialers[source].result())
            for each in itertools.chain(*rounds):
                self.compared += 1
                yield from each.wrong(next(outcome))
            again = [[next(outcome) for _ in sticky] for _ in range(_ROUNDS)]
            for each, *found in zip(sticky, *again, strict=True):
                self.compared += len(found)
                if len(set(found)) > 1:
                    yield f"{each.case}: with affinity {', then '.join(found)}"

    def _keep(self, asked: dict[str, list[_Asked]]) -> None:
        """Keep UDP sockets of answered cases for the next step."""
        for source, cases in asked.items():
            some = [each for each in cases if each.is_answered and each.case.protocol is UDP][:_MOST_KEPT]
            self._dialers[source].keep([each.dial for each in some])
            self._kept[source] = [(each.case, "") for each in some]
        for source, kept in self._kept.items():
            outcomes_ = self._dialers[source].result()
            self._kept[source] = [
                (case, outcome.partition(" ")[0]) for (case, _), outcome in zip(kept, outcomes_, strict=True)
            ]


def _sticky(cases: Iterable[_Asked]) -> list[_Asked]:
    """One frontend of each port that has session affinity and more than one possible endpoint."""
    found: dict[object, _Asked] = {}
    for each in cases:
        claim = each.case.claim
        if claim and claim.question.service.affinity_timeout and each.is_answered and len(each.allowed) > 1:
            found.setdefault((claim.name, each.case.of), each)
    return list(found.values())
