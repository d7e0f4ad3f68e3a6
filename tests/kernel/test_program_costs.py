"""How many instructions this kernel's verifier processes for each BPF program."""

import pytest

from tests.vm.programs import costs

pytestmark = pytest.mark.kernel


def test_every_program_loads_well_below_the_verifiers_limit() -> None:
    """At most a tenth of the limit of one million: a kernel that explores more paths still accepts them."""
    found = costs()
    assert {cost.name: cost.rejection for cost in found if cost.rejection} == {}
    assert {cost.name: cost.verified for cost in found if cost.verified > 100_000} == {}
