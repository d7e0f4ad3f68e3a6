"""The interval between the collector's walks, and the sums of their results."""

import pytest

from ebpfproxy.backends.ebpf.flows.collector import Collected, following
from ebpfproxy.backends.ebpf.flows.sweep import Swept


@pytest.mark.parametrize(
    ("swept", "interval", "calm", "crowded"),
    [
        (Swept(), 10, 20, 20),
        (Swept(), 0, 10, 10),
        (Swept(entries=1000, expired=10), 20, 40, 40),
        (Swept(entries=1000, expired=10), 40, 60, 60),
        (Swept(entries=900, expired=51), 60, 10, 2),
        (Swept(entries=900, retired=51), 60, 10, 2),
        (Swept(entries=900, orphaned=51), 60, 10, 2),
        (Swept(entries=7600, expired=10), 60, 10, 10),
        (Swept(entries=100, replies=7600), 60, 10, 10),
    ],
    ids=[
        *("empty", "at least ten seconds", "little to do", "at most a minute"),
        *("much over", "much retired", "many orphans", "full", "full of replies"),
    ],
)
def test_the_interval_grows_while_few_flows_are_removed(
    swept: Swept, interval: float, calm: float, crowded: float
) -> None:
    assert following(swept, 10_000, interval, crowded=False) == calm
    assert following(swept, 10_000, interval, crowded=True) == crowded


def test_removed_flows_are_summed_and_remaining_flows_are_those_of_the_last_walk() -> None:
    first = Swept(entries=100, half_open=7, expired=10, retired=5, replies=110, orphaned=2, busy=1)
    second = Swept(entries=90, half_open=3, expired=20, orphaned=1)
    assert Collected().plus(first).plus(second) == Collected(
        entries=90, half_open=3, expired=30, retired=5, orphaned=3, busy=1
    )
