"""A short fuzz run: whatever is in the cluster, parsing and tracking go on."""

from collections.abc import Callable

from ebpfproxy.api.event import Event, Invalid, NodeChanged, ServiceChanged, SliceChanged
from ebpfproxy.api.parse import parse_node, parse_service, parse_slice
from ebpfproxy.api.tracker import Tracker
from tests.support.junk import junk_objects

PARSERS: dict[str, Callable[[bytes], Event]] = {
    "Service": parse_service,
    "EndpointSlice": parse_slice,
    "Node": parse_node,
}
KINDS = {"Service": ServiceChanged, "EndpointSlice": SliceChanged, "Node": NodeChanged}


def test_20000_broken_objects_never_raise_and_each_invalid_one_is_named() -> None:
    tracker, invalid, usable = Tracker(started=0.0), 0, 0
    for position, (kind, raw) in enumerate(junk_objects(seed=1, n=20_000)):
        event = PARSERS[kind](raw)
        if isinstance(event, Invalid):
            invalid += 1
            assert event.kind == kind
            assert event.name, raw
            assert event.reason, raw
        else:
            usable += 1
            assert isinstance(event, KINDS[kind])
        tracker.fold(event)
        if position % 100 == 0:
            drained = tracker.drain()
            assert all(drained.state.slices.values())
            assert not tracker.pending
    assert invalid > 5_000
    assert usable > 5_000
    assert sum(tracker.invalid.values()) == invalid


def test_the_same_seed_gives_the_same_junk() -> None:
    assert list(junk_objects(7, 200)) == list(junk_objects(7, 200))
    assert list(junk_objects(7, 200)) != list(junk_objects(8, 200))
