"""The end of a test run's output: what did not run and why, and how to repeat what failed."""

import collections
import re
import shlex
from collections.abc import Iterable, Sequence

import pytest

_FEATURES = r"\bno (devices of kind )?(IPVS|SCTP|Geneve|dummy|macvlan|GRE|IPIP|SIT|WireGuard|tcx)\b"
_REMEDIES = (
    (re.compile(_FEATURES, re.IGNORECASE), "make test-user-mode"),
    (re.compile("software emulation"), "make test-all"),
    (re.compile("no program (?P<package>[a-z0-9-]+)$"), "apt-get install {package}"),
)
"""The reason of a skip, and the command after which, or by which, such tests run."""

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
    for pattern, remedy in _REMEDIES:
        if found := pattern.search(reason):
            command = remedy.format(**found.groupdict())
            return "" if command in reason else f" ({command})"
    return ""


def rerun(failed: Sequence[str]) -> str:
    """The command that runs the failed tests again, given their node ids."""
    which = shlex.join(failed) if len(failed) <= _NAMED else "--last-failed"
    return f".venv/bin/python -m pytest {which}"
