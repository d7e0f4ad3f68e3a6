"""All backends in comparison with the reference, through random histories of Services.

Clients get the outcomes of Kubernetes' rules, which tests/support/reference.py computes, except for the
differences in differences.py. Each history begins with the state at the end of the previous one.
"""

import functools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.kernel.differential.course import Course
from tests.kernel.differential.differences import DIFFERENCES, adapted
from tests.kernel.differential.history import Step, histories, history_of_differences
from tests.kernel.differential.subject import Subject

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]


def test_clients_reach_the_endpoints_of_the_reference(
    subjects: tuple[Subject, ...],
    pytestconfig: pytest.Config,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    """A few histories, always the same ones, or --histories random ones. --junitxml=FILE records the numbers
    of steps and of compared outcomes."""
    course = Course(subjects, functools.partial(adapted, DIFFERENCES))
    many: int | None = pytestconfig.getoption("--histories")

    @settings(
        max_examples=many or (5 if pytestconfig.getoption("sample") else 15),
        derandomize=many is None,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(histories())
    def follow(history: tuple[Step, ...]) -> None:
        course.run(history)

    follow()
    record_testsuite_property("steps", course.steps)
    record_testsuite_property("outcomes compared", course.compared)


def test_a_history_that_shows_all_differences_has_the_expected_outcomes(
    subjects: tuple[Subject, ...],
) -> None:
    Course(subjects, functools.partial(adapted, DIFFERENCES)).run(history_of_differences())


@pytest.mark.long  # about the list itself, not about a backend
def test_each_listed_difference_is_needed(subject: Subject) -> None:
    """Without any one of the differences the history above has an unexpected outcome."""
    unneeded = []
    for each in DIFFERENCES:
        if subject.name in each.modes:
            course = Course([subject], functools.partial(adapted, [a for a in DIFFERENCES if a is not each]))
            if not _goes_wrong(course, subject.name):
                unneeded.append(each.why)
    assert not unneeded


def _goes_wrong(course: Course, subject: str) -> bool:
    try:
        course.run(history_of_differences())
    except AssertionError as failure:
        return f"{subject}, " in str(failure)
    return False
