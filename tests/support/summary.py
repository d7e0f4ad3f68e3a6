"""The end of a test run's output: what did not run and why, and how to repeat what failed."""

import collections
import shlex
from collections.abc import Iterable, Sequence

import pytest

_REMEDIES = (
    (
        ("IPVS", "SCTP", "Geneve", "dummy", "macvlan", "GRE", "IPIP", "SIT", "has no tcx"),
        "make test-user-mode",
    ),
    (("software emulation",), "make test-all"),
    (("no program ruby",), "apt-get install ruby"),
    (("make test-image",), "make test-image"),
)
"""Words in the reason of a skip, and the command that runs such tests."""

_NAMED = 8
"""So many failed tests are named in the command that repeats them."""


def skipped(reports: Iterable[pytest.TestReport]) -> list[str]:
    """One line for each reason, the most frequent first: the number of tests, the reason, and a remedy."""
    reasons = collections.Counter(map(_reason, reports))
    return [f"{count:5} skipped: {reason}{_remedy(reason)}" for reason, count in reasons.most_common()]


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").splitlines()[0]


def _remedy(reason: str) -> str:
    """What runs the tests that were skipped for this reason; "" if the reason says it."""
    found = next((remedy for words, remedy in _REMEDIES if any(word in reason for word in words)), "")
    return f" ({found})" if found and found not in reason else ""


def rerun(failed: Sequence[str]) -> str:
    """The command that runs the failed tests again, given their node ids."""
    which = shlex.join(failed) if len(failed) <= _NAMED else "--last-failed"
    return f".venv/bin/python -m pytest {which}"
