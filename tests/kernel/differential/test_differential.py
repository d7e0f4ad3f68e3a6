"""All dataplanes side by side: what clients reach through random histories of Services is what Kubernetes'
rules say, worked out by tests/support/reference.py, but for what is in differences.py.

Each history begins with what the one before it left.
"""

import functools

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.kernel.differential.course import Course
from tests.kernel.differential.differences import DIFFERENCES, adapted
from tests.kernel.differential.history import Step, histories, history_of_differences
from tests.kernel.differential.subject import Subject

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]

FEW = 15


def test_clients_reach_what_the_reference_says(
    subjects: tuple[Subject, ...], pytestconfig: pytest.Config
) -> None:
    """A few histories, always the same ones, or as many others as --histories says."""
    course = Course(subjects, functools.partial(adapted, DIFFERENCES))
    many: int | None = pytestconfig.getoption("--histories")

    @settings(
        max_examples=many or FEW,
        derandomize=many is None,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(histories())
    def follow(history: tuple[Step, ...]) -> None:
        course.run(history)

    follow()


def test_a_history_that_meets_all_differences(subjects: tuple[Subject, ...]) -> None:
    Course(subjects, functools.partial(adapted, DIFFERENCES)).run(history_of_differences())


@pytest.mark.parametrize("number", range(len(DIFFERENCES)), ids=lambda number: DIFFERENCES[number].why[:50])
def test_each_difference_is_one(subjects: tuple[Subject, ...], number: int) -> None:
    """Without its line the history above is not as expected, in each of its modes."""
    others = DIFFERENCES[:number] + DIFFERENCES[number + 1 :]
    concerned = [subject for subject in subjects if subject.name in DIFFERENCES[number].modes]
    if not concerned:
        pytest.skip(f"none of {', '.join(DIFFERENCES[number].modes)} works on this machine")
    for subject in concerned:
        course = Course([subject], functools.partial(adapted, others))
        with pytest.raises(AssertionError, match=f"{subject.name}, "):
            course.run(history_of_differences())
