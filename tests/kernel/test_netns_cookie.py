"""Which network namespace is the agent's, on kernels that tell it and on those where a program has to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.ebpf import cleanup
from ebpfproxy.backends.ebpf.sockets import netns_cookie
from ebpfproxy.errors import Rejected, Unsupported
from ebpfproxy.linux.netns import netns
from tests.support.bpf_place import bpf_place

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def group() -> Iterator[Path]:
    with bpf_place() as place:
        yield place.cgroup


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel from before 5.14."""

    def cookie() -> int:
        raise Unsupported("this kernel has no SO_NETNS_COOKIE (Linux 5.14)")

    monkeypatch.setattr(netns, "cookie", cookie)


def test_a_kernel_that_tells_it_is_believed(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "cookie", lambda: 4711)
    assert netns_cookie.own(group) == 4711


@pytest.mark.usefixtures("untold")
def test_on_an_older_kernel_each_namespace_has_one_of_its_own(group: Path) -> None:
    here = netns_cookie.own(group)
    with netns.throw_away():
        there = netns_cookie.own(group)
        assert netns_cookie.own(group) == there
    assert netns_cookie.own(group) == here
    assert 0 not in (here, there)
    assert here != there


def test_a_program_tells_what_the_kernel_tells(group: Path) -> None:
    try:
        expected = netns.cookie()
    except Unsupported as lack:
        pytest.skip(lack.message)
    assert netns_cookie.read_by_program(group) == expected


@pytest.mark.usefixtures("untold")
def test_nothing_stays_of_the_cgroup_that_it_takes(group: Path) -> None:
    netns_cookie.own(group)
    assert [entry.name for entry in group.iterdir() if entry.is_dir()] == []


def test_what_an_agent_left_that_was_killed_meanwhile_is_cleaned_up(group: Path) -> None:
    left = group / "ebpfproxy-temporary-left"
    left.mkdir()
    with netns.throw_away():
        assert f"cgroup {left.name}" in cleanup.remove(group / "none", group, dry_run=True)
        assert left.is_dir()
        assert f"cgroup {left.name}" in cleanup.remove(group / "none", group)
    assert not left.exists()


@pytest.mark.usefixtures("untold")
def test_a_cgroup_root_that_is_not_there_is_named(group: Path) -> None:
    with pytest.raises(Rejected, match=f"cannot create a cgroup below {group}/none") as caught:
        netns_cookie.own(group / "none")
    assert "--cgroup-root" in caught.value.hint


def test_an_error_of_another_kind_is_not_taken_for_an_older_kernel(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cookie() -> int:
        raise Rejected("cannot read SO_NETNS_COOKIE: Operation not permitted")

    monkeypatch.setattr(netns, "cookie", cookie)
    with pytest.raises(Rejected):
        netns_cookie.own(group)
