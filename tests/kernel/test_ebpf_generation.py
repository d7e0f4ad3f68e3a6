"""Changes of hooks and devices by other programs are detected although the agent changed them in between."""

import contextlib
from collections.abc import Collection, Iterator, Mapping

import pytest

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.ebpf.backend import EbpfBackend, EbpfSettings
from ebpfproxy.backends.ebpf.entries import Entry, Key
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.model.address import parse_network
from ebpfproxy.plan.service_plan import NodePlan
from tests.contract.conftest import RealDevices
from tests.contract.test_backend import watched
from tests.kernel.cluster import eventually
from tests.support.bpf_place import BpfPlace, bpf_place
from tests.support.namespace import namespace

pytestmark = pytest.mark.kernel


@pytest.fixture
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@contextlib.contextmanager
def opened(place: BpfPlace, *, devices: bool = True) -> Iterator[EbpfBackend]:
    plane = EbpfBackend(EbpfSettings(place.cgroup, place.bpffs, devices=devices))
    plane.open()
    try:
        yield plane
    finally:
        plane.close()


@pytest.fixture
def devices() -> Iterator[RealDevices]:
    with namespace("generation") as made, made.entered():
        yield RealDevices()


def attached(place: BpfPlace) -> list[int]:
    """A link without a pin ends in a work queue of the kernel (bpf_link_put())."""
    return [each for hook in SOCKET_HOOKS for each in cgroup.programs(place.cgroup, hook.attach_type)]


def test_a_foreign_change_just_before_the_agents_own_change_is_detected(place: BpfPlace) -> None:
    """A proxier records the generation after its sync. It must not be the generation of unread hooks."""
    with opened(place, devices=False) as plane:
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


@pytest.mark.parametrize(("stripped", "detected"), [("one", False), ("two", True)])
def test_a_foreign_change_of_a_device_is_detected_unless_the_agent_changes_the_device_itself(
    place: BpfPlace, devices: RealDevices, stripped: str, detected: bool
) -> None:
    """Another program removes the agent's programs from a device, just before the agent leaves device one."""
    one, two = devices.add("one"), devices.add("two")
    with opened(place) as plane:
        both: dict[Key, Entry] = plane.render((), watched((one, "one"), (two, "two")))
        assert not plane.apply(diff(plane.read(), both))
        devices.strip(stripped)
        assert not plane.apply(diff(both, plane.render((), watched((two, "two")))))
        before = plane.generation()
        assert (plane.generation() != before) is detected


def test_a_foreign_change_during_the_agents_own_change_is_detected(
    place: BpfPlace, devices: RealDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent once took it for its own: no other comparison finds it before the sync period ends."""
    one, two = devices.add("one"), devices.add("two")
    with opened(place) as plane:
        first = plane.render((), watched((one, "one")))
        assert not plane.apply(diff(plane.read(), first))
        both = plane.render((), watched((one, "one"), (two, "two")))
        attach = plane._programs.attach  # the last step of a change

        def disturbed(hooks: Collection[str]) -> Mapping[str, KernelError]:
            devices.strip("one")
            return attach(hooks)

        with monkeypatch.context() as patch:
            patch.setattr(plane._programs, "attach", disturbed)
            assert not plane.apply(diff(first, both))
        before = plane.generation()
        assert plane.generation() != before
        assert not plane.apply(diff(plane.read(), both))
        before = plane.generation()
        assert plane.generation() == before
