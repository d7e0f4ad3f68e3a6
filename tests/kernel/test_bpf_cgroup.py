"""Programs at cgroups: attached with and without links, replaced, and after their cgroup was removed."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpfproxy.errors import NotFound, Rejected, Unsupported
from ebpfproxy.linux.bpf import bpf, cgroup
from ebpfproxy.linux.bpf.bpf import Link, Program
from tests.support.bpf_place import CONNECT4, BpfPlace, bpf_place, load_program, remove_cgroup

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def _place() -> Iterator[BpfPlace]:
    with bpf_place() as created:
        yield created


@pytest.fixture
def group(_place: BpfPlace) -> Iterator[Path]:
    """An empty cgroup for one test."""
    path = _place.cgroup / "group"
    path.mkdir()
    try:
        yield path
    finally:
        remove_cgroup(path)


@pytest.fixture
def pin(_place: BpfPlace) -> Iterator[Path]:
    path = _place.bpffs / "link"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@pytest.fixture
def one() -> Iterator[Program]:
    made = load_program(name=b"one")
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[Program]:
    made = load_program(name=b"two")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_descriptor_is_left(group: Path, one: Program, two: Program) -> Iterator[None]:
    before = len(list(os.scandir("/proc/self/fd")))
    yield
    assert len(list(os.scandir("/proc/self/fd"))) == before


def until(holds: Callable[[], bool]) -> None:
    """Wait for at most ten seconds."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def link_id(pin: Path) -> int:
    with contextlib.closing(Link.pinned(pin)) as link:
        return int.from_bytes(link.facts(32)[4:8], "little")


def test_a_program_is_attached_until_its_link_is_unpinned(group: Path, pin: Path, one: Program) -> None:
    assert cgroup.programs(group, CONNECT4) == []
    cgroup.attach_link(one, group, CONNECT4, pin)
    assert cgroup.programs(group, CONNECT4) == [one.id]
    with contextlib.closing(Link.pinned(pin)) as link:
        assert link.program_id == one.id
        assert link.cgroup_id == group.stat().st_ino
    pin.unlink()
    until(lambda: not cgroup.programs(group, CONNECT4))  # the kernel releases a link in the background


def test_a_detached_link_is_detached_at_once(group: Path, pin: Path, one: Program) -> None:
    """An unpinned link is detached later, by a work queue of the kernel."""
    for _ in range(50):
        cgroup.attach_link(one, group, CONNECT4, pin)
        assert cgroup.programs(group, CONNECT4) == [one.id]
        cgroup.detach_link(pin)
        assert cgroup.programs(group, CONNECT4) == []
        assert not pin.exists()
    cgroup.detach_link(pin)  # it does not exist


def test_a_link_keeps_its_id_when_its_program_is_replaced(
    group: Path, pin: Path, one: Program, two: Program
) -> None:
    cgroup.attach_link(one, group, CONNECT4, pin)
    link = link_id(pin)
    cgroup.attach_link(two, group, CONNECT4, pin)
    assert cgroup.programs(group, CONNECT4) == [two.id]
    assert link_id(pin) == link


def test_attaching_the_same_program_again_changes_nothing(group: Path, pin: Path, one: Program) -> None:
    cgroup.attach_link(one, group, CONNECT4, pin)
    link = link_id(pin)
    cgroup.attach_link(one, group, CONNECT4, pin)
    assert cgroup.programs(group, CONNECT4) == [one.id]
    assert link_id(pin) == link


def test_a_link_whose_cgroup_was_removed_is_created_again(
    group: Path, pin: Path, one: Program, two: Program
) -> None:
    """Regression, projectcalico/calico#12801: permanent ENOLINK at each start."""
    cgroup.attach_link(one, group, CONNECT4, pin)
    group.rmdir()
    with contextlib.closing(Link.pinned(pin)) as link:
        until(lambda: link.cgroup_id == 0)  # the kernel releases a cgroup in the background
        with pytest.raises(Rejected) as caught:
            link.replace(two)
        assert bpf.errno_of(caught.value) == errno.ENOLINK
    group.mkdir()
    cgroup.attach_link(two, group, CONNECT4, pin)
    assert cgroup.programs(group, CONNECT4) == [two.id]
    with contextlib.closing(Link.pinned(pin)) as link:
        assert link.cgroup_id == group.stat().st_ino


def test_a_link_at_another_cgroup_is_replaced(group: Path, pin: Path, one: Program) -> None:
    """Regression, cilium/cilium#48420: the existing link was attached to a cgroup without processes."""
    other = group / "other"
    other.mkdir()
    cgroup.attach_link(one, other, CONNECT4, pin)
    cgroup.attach_link(one, group, CONNECT4, pin)
    assert cgroup.programs(group, CONNECT4) == [one.id]
    until(lambda: not cgroup.programs(other, CONNECT4))


def test_a_child_cgroup_runs_its_parents_programs(group: Path, pin: Path, one: Program) -> None:
    below = group / "below"
    below.mkdir()
    cgroup.attach_link(one, group, CONNECT4, pin)
    assert cgroup.programs(below, CONNECT4) == []
    assert one.id in cgroup.programs(below, CONNECT4, effective=True)
    assert one.id not in cgroup.programs(group.parent, CONNECT4, effective=True)


def test_links_keep_foreign_programs_attached(group: Path, pin: Path, one: Program, two: Program) -> None:
    cgroup.attach_multi(one, group, CONNECT4, None)
    cgroup.attach_link(two, group, CONNECT4, pin)
    assert cgroup.programs(group, CONNECT4) == [one.id, two.id]
    cgroup.detach(one, group, CONNECT4)
    assert cgroup.programs(group, CONNECT4) == [two.id]


def test_without_links_a_program_is_replaced_in_place(group: Path, one: Program, two: Program) -> None:
    third = load_program(name=b"third")
    cgroup.attach_multi(one, group, CONNECT4, None)
    cgroup.attach_multi(third, group, CONNECT4, None)
    cgroup.attach_multi(two, group, CONNECT4, one)
    assert cgroup.programs(group, CONNECT4) == [two.id, third.id]
    third.close()


def test_without_links_the_program_to_replace_may_be_missing(group: Path, one: Program, two: Program) -> None:
    cgroup.attach_multi(two, group, CONNECT4, one)
    assert cgroup.programs(group, CONNECT4) == [two.id]


def test_detaching_twice_is_no_error(group: Path, one: Program) -> None:
    cgroup.attach_multi(one, group, CONNECT4, None)
    cgroup.detach(one, group, CONNECT4)
    cgroup.detach(one, group, CONNECT4)
    assert cgroup.programs(group, CONNECT4) == []


def test_a_cgroup_that_does_not_exist_is_named(group: Path, pin: Path, one: Program) -> None:
    missing = group / "missing"
    for act in (
        lambda: cgroup.programs(missing, CONNECT4),
        lambda: cgroup.attach_link(one, missing, CONNECT4, pin),
        lambda: cgroup.attach_multi(one, missing, CONNECT4, None),
        lambda: cgroup.detach(one, missing, CONNECT4),
        lambda: cgroup.programs(group / "cgroup.procs", CONNECT4),
    ):
        with pytest.raises(NotFound, match=str(group)):
            act()
    assert not pin.exists()


def test_a_directory_that_is_not_a_cgroup_is_rejected(pin: Path, tmp_path: Path, one: Program) -> None:
    with pytest.raises((Rejected, Unsupported)):
        cgroup.attach_link(one, tmp_path, CONNECT4, pin)
    with pytest.raises(Rejected):
        cgroup.attach_multi(one, tmp_path, CONNECT4, None)
    assert not pin.exists()


def test_a_program_for_another_hook_is_rejected(group: Path, pin: Path, one: Program) -> None:
    with pytest.raises((Rejected, Unsupported)):
        cgroup.attach_link(one, group, CONNECT4 + 1, pin)
    assert not pin.exists()
    assert cgroup.programs(group, CONNECT4 + 1) == []
