"""What the contract of a dataplane is checked against: the fake, and each real one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ebpfproxy.dataplanes.delta import diff
from ebpfproxy.dataplanes.ebpf.dataplane import EbpfDataplane, EbpfSettings
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.dataplanes.fake import FakeDataplane, FakeKernel
from ebpfproxy.dataplanes.interface import Dataplane
from ebpfproxy.plan.service_plan import NodePlan
from tests.support.bpf_place import BpfPlace, bpf_place
from tests.support.clock import Clock

ROOM = 8
"""How many frontends the dataplanes of these tests have room for."""


class Subject:
    """A dataplane, and how to have another run of the agent take it over."""

    def __init__(self, make: Callable[[Clock], Dataplane[Any, Any]]) -> None:
        self._make = make
        self.clock = Clock()
        self.plane = make(self.clock)
        self.plane.open()

    def reopen(self) -> None:
        self.plane.close()
        self.plane = self._make(self.clock)
        self.plane.open()


@pytest.fixture(scope="session")
def _ebpf_place() -> Iterator[BpfPlace]:
    with bpf_place() as place:
        yield place


@pytest.fixture(params=["fake", pytest.param("ebpf", marks=pytest.mark.kernel)])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Open, with the entries of an empty node. The real one keeps its compiled programs from test to test."""
    make: Callable[[Clock], Dataplane[Any, Any]]
    if request.param == "fake":
        kernel = FakeKernel(capacity=ROOM)
        make = lambda clock: FakeDataplane(kernel)  # noqa: E731
    else:
        place: BpfPlace = request.getfixturevalue("_ebpf_place")
        settings = EbpfSettings(place.cgroup, place.bpffs, sizes=MapSizes(ROOM, 64, 64, 16, 16))
        make = lambda clock: EbpfDataplane(settings, clock=clock)  # noqa: E731
    made = Subject(make)
    try:
        node = made.plane.render((), NodePlan())
        assert not made.plane.apply(diff(made.plane.read(), node))
        assert made.plane.read() == node
        yield made
    finally:
        made.plane.close()
