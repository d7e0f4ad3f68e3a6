"""Changes of the maps by another program are noticed, and one apply repairs them."""

import contextlib
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from tests.kernel.service_table.foreign_writer import DAMAGES, HARMLESS, ForeignWriter, spoil
from tests.kernel.service_table.samples import (
    SEVERAL,
    bring,
    opened,
    wipe,
)
from tests.kernel.service_table.steps import lists_of
from tests.support.clock import Clock
from tests.support.examples import examples
from tests.support.service_maps import check_exact, check_safe

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("same_process", [True, False])
def test_changes_by_another_program_are_noticed_and_repaired(
    roomy: Maps, damage: str, same_process: bool
) -> None:
    """Regression, projectcalico/calico#13279: duplicate ids were never repaired."""
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(opened(roomy))
        bring(table, {}, SEVERAL)
        DAMAGES[damage](ForeignWriter(roomy))
        if not same_process:
            table = stack.enter_context(opened(roomy))
        found = table.read()
        assert found != SEVERAL or damage in HARMLESS
        bring(table, found, SEVERAL)
        assert table.read() == SEVERAL
        if damage not in ("slots in another order", "endpoint 0", "the same place before"):
            check_exact(roomy, SEVERAL, table.usage())
        check_safe(roomy, lists_of(SEVERAL))


@given(st.integers(0, 1 << 32))
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_random_content_of_every_map_is_repaired(roomy_maps: Maps, seed: int) -> None:
    """A map full of random content may reject entries at first. Wrong entries are dropped nevertheless."""
    wipe(roomy_maps)
    chance = random.Random(seed)
    clock = Clock()
    with opened(roomy_maps, clock) as table:
        bring(table, {}, SEVERAL)
        spoil(roomy_maps, chance)
        for _ in range(4):
            delta = diff(table.read(), SEVERAL)
            table.apply(delta.puts, delta.drops)
            clock.now += GRACE
        assert table.read() == SEVERAL
        wipe_endpoint_0(roomy_maps)
        check_exact(roomy_maps, SEVERAL, table.usage())


def wipe_endpoint_0(maps: Maps) -> None:
    """Clear it, since ServiceTable never uses endpoint 0."""
    maps["endpoints"].update(bytes(4), bytes(abi.ENDPOINT.size))
