"""A foreign change of the hooks is detected although the agent itself changed them in between."""

from collections.abc import Iterator

import pytest

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.ebpf.backend import EbpfBackend, EbpfSettings
from ebpfproxy.backends.ebpf.entries import Entry, Key
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.model.address import parse_network
from ebpfproxy.plan.service_plan import NodePlan
from tests.kernel.cluster import eventually
from tests.support.bpf_place import BpfPlace, bpf_place

pytestmark = pytest.mark.kernel


@pytest.fixture
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


def attached(place: BpfPlace) -> list[int]:
    """A link without a pin ends in a work queue of the kernel (bpf_link_put())."""
    return [each for hook in SOCKET_HOOKS for each in cgroup.programs(place.cgroup, hook.attach_type)]


def test_a_foreign_change_just_before_the_agents_own_change_is_detected(place: BpfPlace) -> None:
    """A proxier records the generation after its sync. It must not be the generation of unread hooks."""
    plane = EbpfBackend(EbpfSettings(place.cgroup, place.bpffs, devices=False))
    plane.open()
    try:
        wanted: dict[Key, Entry] = plane.render((), NodePlan())
        assert not plane.apply(diff(plane.read(), wanted))
        before = plane.generation()
        assert plane.generation() == before
        for pin in (place.bpffs / "links").iterdir():
            pin.unlink()
        eventually(lambda: not attached(place), "the kernel has detached the programs")
        network: dict[Key, Entry] = {parse_network("192.0.2.10/32"): 1}
        assert not plane.apply(Delta(network, frozenset()))
        before = plane.generation()
        assert plane.generation() != before
        assert not plane.apply(diff(plane.read(), wanted | network))
        before = plane.generation()
        assert plane.generation() == before
    finally:
        plane.close()
