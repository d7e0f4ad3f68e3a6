"""The loops of the BPF programs: kernels before Linux 6.8 accept only loops that a jump closes."""

import pytest

from tests.support.program_code import loops_closed_by_falling, program_code

pytestmark = pytest.mark.kernel


def test_every_loop_is_closed_by_a_jump() -> None:
    """Regression: 5.10 and 6.1 rejected the classifiers, "back-edge from insn 978 to 979"."""
    with program_code(()) as code:
        closed = {name: loops_closed_by_falling(each) for name, each in code.items()}
    assert {name: loops for name, loops in closed.items() if loops} == {}
