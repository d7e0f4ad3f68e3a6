"""ServiceTable.check finds each difference that `read` finds, also while changes are applied."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services import check
from ebpfproxy.backends.ebpf.services import table as table_module
from tests.kernel.service_table.foreign_writer import DAMAGES, HARMLESS, ForeignWriter, spoil
from tests.kernel.service_table.samples import SEVERAL, Entries, bring, exposed, key, opened
from tests.support.clock import Clock

pytestmark = pytest.mark.kernel

COUNTED = {name for name in DAMAGES if name.startswith(("a name too", "a name that", "a name of"))}
COUNTED |= {"an endpoint too many", "an endpoint listed but unused"}
"""Damages that only a count finds."""


@pytest.fixture(params=[1, 1024])
def step_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of entries in a step: one, or all of them."""
    size: int = request.param
    for name in ("_WALKED", "_LOOKED_UP", "_ENDPOINTS"):
        monkeypatch.setattr(check, name, size)
    return size


def test_what_was_written_has_no_difference(roomy: Maps, step_size: int) -> None:
    with opened(roomy) as table:
        assert all(table.check())
        bring(table, {}, SEVERAL)
        assert all(table.check())
        table.read()
        assert all(table.check())
        bring(table, SEVERAL, {})
        assert all(table.check())


@pytest.mark.parametrize("damage", DAMAGES)
def test_changes_by_another_program_are_found_and_end_with_the_repair(
    roomy: Maps, damage: str, step_size: int
) -> None:
    with opened(roomy) as table:
        bring(table, {}, SEVERAL)
        assert all(table.check())  # the next check is one by digest
        DAMAGES[damage](ForeignWriter(roomy))
        assert not all(table.check()) or damage in HARMLESS
        bring(table, table.read(), SEVERAL)
        assert all(table.check())


@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - COUNTED))
def test_changes_by_another_program_are_found_while_the_agent_changes_services(
    roomy: Maps, damage: str, step_size: int
) -> None:
    """The walks cannot count entries then."""
    states: list[Entries] = [SEVERAL | {key("churn"): exposed(9, endpoints=n)} for n in (1, 2)]
    with opened(roomy) as table:
        bring(table, {}, states[0])
        DAMAGES[damage](ForeignWriter(roomy))
        found = False
        for steps, is_right in enumerate(table.check(), 1):
            found |= not is_right
            bring(table, states[(steps + 1) % 2], states[steps % 2])
        assert found or damage in HARMLESS


def test_changes_of_the_agent_between_the_steps_are_no_difference(roomy: Maps, step_size: int) -> None:
    """Services appear, change, grow, shrink and disappear at random."""
    chance, clock = random.Random(7), Clock()
    state: Entries = dict(SEVERAL)
    with opened(roomy, clock) as table:
        bring(table, {}, state)
        for _ in range(20):
            for is_right in table.check():
                assert is_right
                wanted = dict(state)
                n = chance.randrange(6)
                if chance.random() < 0.3:
                    wanted.pop(key(f"s{n}"), None)
                else:
                    wanted[key(f"s{n}")] = exposed(10 + n, chance.randint(1, 3), chance.randint(0, 5))
                bring(table, state, wanted)
                clock.now += 10
                state = wanted


def test_unchanged_maps_are_compared_once(roomy: Maps, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counting(*arguments: Any) -> Iterator[bool]:
        compared.append(arguments)
        yield from check.check_services(*arguments)

    monkeypatch.setattr(table_module, "check_services", counting)
    with opened(roomy) as table:
        bring(table, {}, SEVERAL)
        for _ in range(3):
            assert all(table.check())
            bring(table, SEVERAL, SEVERAL)  # only others than Services have changed
        assert len(compared) == 1
        bring(table, SEVERAL, SEVERAL | {key("another"): exposed(9)})
        assert all(table.check())
        assert len(compared) == 2
        table.read()
        assert all(table.check())
        assert len(compared) == 3


def test_a_change_by_another_program_during_a_check_is_found_at_the_latest_by_the_next(
    roomy: Maps, step_size: int
) -> None:
    """A digest must not be that of content which was not compared."""
    with opened(roomy) as table:
        bring(table, {}, SEVERAL)
        for when in range(sum(table.check())):
            bring(table, table.read(), SEVERAL)
            for step, _ in enumerate(table.check()):
                if step == when:
                    ForeignWriter(roomy).all_slots(1)
            assert not all(table.check())


def test_a_read_ends_the_check(roomy: Maps, step_size: int) -> None:
    with opened(roomy) as table:
        bring(table, {}, SEVERAL)
        steps = table.check()
        assert next(steps)
        table.read()
        assert list(steps) == []


def test_random_content_is_found(roomy: Maps) -> None:
    with opened(roomy) as table:
        bring(table, {}, SEVERAL)
        spoil(roomy, random.Random(1))
        assert not all(table.check())
