"""What the verifier of this kernel makes of each BPF program."""

import pytest

from tests.vm.programs import costs

pytestmark = pytest.mark.kernel


def test_every_program_is_loaded_well_below_the_verifiers_limit() -> None:
    """Below half of the million, so that a later kernel that looks at more ways does not reject at once."""
    found = costs()
    assert {cost.name: cost.rejection for cost in found if cost.rejection} == {}
    assert {cost.name: cost.verified for cost in found if cost.verified > 500_000} == {}
