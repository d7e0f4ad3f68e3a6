"""When the collector walks again."""

import pytest

from ebpfproxy.dataplanes.ebpf.flow_collector import Collected, following
from ebpfproxy.dataplanes.ebpf.flow_sweep import Swept


@pytest.mark.parametrize(
    ("swept", "interval", "expected"),
    [
        (Swept(), 10, 20),
        (Swept(entries=1000, expired=10), 20, 40),
        (Swept(entries=1000, expired=10), 40, 60),
        (Swept(entries=900, expired=51), 60, 10),
        (Swept(entries=900, retired=51), 60, 10),
        (Swept(entries=7600, expired=10), 60, 10),
    ],
    ids=["empty", "little to do", "at most a minute", "much over", "much retired", "crowded"],
)
def test_the_less_there_is_to_remove_the_rarer_are_walks(
    swept: Swept, interval: float, expected: float
) -> None:
    assert following(swept, 10_000, interval) == expected


def test_what_was_collected_adds_up_and_what_is_left_is_of_the_last_walk() -> None:
    total = Collected().plus(Swept(100, 10, 5, 1)).plus(Swept(90, 20, 0, 0))
    assert total == Collected(entries=90, expired=30, retired=5, busy=1)
