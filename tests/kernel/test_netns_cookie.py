"""The cookie of the agent's network namespace: from the kernel, or from a BPF program on older kernels."""

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
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel before Linux 5.14."""

    def cookie() -> int:
        raise Unsupported("this kernel has no SO_NETNS_COOKIE (Linux 5.14)")

    monkeypatch.setattr(netns, "cookie", cookie)


def test_the_cookie_that_the_kernel_reports_is_used(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "cookie", lambda: 4711)
    assert netns_cookie.own(group) == 4711


@pytest.mark.usefixtures("old_kernel")
def test_on_an_older_kernel_each_namespace_has_its_own_cookie(group: Path) -> None:
    first = netns_cookie.own(group)
    with netns.throw_away():
        second = netns_cookie.own(group)
        assert netns_cookie.own(group) == second
    assert netns_cookie.own(group) == first
    assert 0 not in (first, second)
    assert first != second


def test_the_program_reads_the_cookie_that_the_kernel_reports(group: Path) -> None:
    try:
        expected = netns.cookie()
    except Unsupported as lack:
        pytest.skip(lack.message)
    assert netns_cookie.read_by_program(group) == expected


@pytest.mark.usefixtures("old_kernel")
def test_the_temporary_cgroup_is_removed(group: Path) -> None:
    netns_cookie.own(group)
    assert [entry.name for entry in group.iterdir() if entry.is_dir()] == []


def test_cleanup_removes_the_temporary_cgroup_of_a_killed_agent(group: Path) -> None:
    left = group / "ebpfproxy-temporary-left"
    left.mkdir()
    with netns.throw_away():
        assert f"cgroup {left.name}" in cleanup.remove(group / "none", group, dry_run=True)
        assert left.is_dir()
        assert f"cgroup {left.name}" in cleanup.remove(group / "none", group)
    assert not left.exists()


@pytest.mark.usefixtures("old_kernel")
def test_a_missing_cgroup_root_is_named_in_the_error(group: Path) -> None:
    with pytest.raises(Rejected, match=f"cannot create a cgroup below {group}/none") as caught:
        netns_cookie.own(group / "none")
    assert "--cgroup-root" in caught.value.hint


def test_other_errors_are_not_mistaken_for_an_older_kernel(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cookie() -> int:
        raise Rejected("cannot read SO_NETNS_COOKIE: Operation not permitted")

    monkeypatch.setattr(netns, "cookie", cookie)
    with pytest.raises(Rejected):
        netns_cookie.own(group)
