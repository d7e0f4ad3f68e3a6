"""Tests that a run leaves to other targets of make, and their number, which the end of the output shows."""

from collections.abc import Callable

import pytest

_COUNTS = pytest.StashKey[dict[str, int]]()


def counts(config: pytest.Config) -> dict[str, int]:
    """The number of tests that were left out, by the target of make that runs them."""
    return config.stash.setdefault(_COUNTS, {})


def leave_out(
    config: pytest.Config, items: list[pytest.Item], target: str, is_left_out: Callable[[pytest.Item], bool]
) -> None:
    """Deselect the items that the target of make runs."""
    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]
        counts(config)[target] = counts(config).get(target, 0) + len(left_out)
