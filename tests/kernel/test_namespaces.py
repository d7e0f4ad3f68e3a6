"""Finding and entering network namespaces."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.netns import namespaces

pytestmark = pytest.mark.kernel


def inode(path: str | int) -> int:
    return os.stat(path).st_ino  # noqa: PTH116  (a descriptor too)


def own() -> int:
    return inode("/proc/thread-self/ns/net")


@pytest.fixture
def named() -> Iterator[str]:
    """The path of a network namespace that no process uses, mounted under /run/netns."""
    name = f"ebpfproxy-test-{os.getpid()}-namespaces"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        yield f"/run/netns/{name}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def process() -> Iterator[int]:
    """The PID of a process in its own network namespace, which is not mounted anywhere."""
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        try:
            yield child.pid
        finally:
            child.kill()


def test_every_namespace_is_listed_once(named: str, process: int) -> None:
    # Other tests end namespaces after they were listed.
    found = [each for path in namespaces.network_namespaces() if (each := namespaces.identity_of(path))]
    assert len(found) == len(set(found))
    assert {own(), inode(named), inode(f"/proc/{process}/ns/net")} <= {number for _, number in found}


def test_opened_descriptors_cover_the_same_namespaces_and_are_closed_afterwards(
    named: str, process: int
) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with contextlib.closing(namespaces.opened_network_namespaces()) as opened:
        found = [inode(descriptor) for descriptor in opened]
    assert len(found) == len(set(found))
    assert {own(), inode(named), inode(f"/proc/{process}/ns/net")} <= set(found)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_an_iterator_left_early_leaves_no_descriptor_open(named: str) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with contextlib.closing(namespaces.opened_network_namespaces()) as opened:
        next(opened)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_an_opened_namespace_stays_usable_after_its_process_ends(process: int) -> None:
    wanted = inode(f"/proc/{process}/ns/net")
    with contextlib.closing(namespaces.opened_network_namespaces()) as opened:
        descriptor = next(one for one in opened if inode(one) == wanted)
        os.kill(process, 9)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        with namespaces.in_namespace(descriptor):
            assert own() == wanted
    paths = namespaces.network_namespaces()
    assert wanted not in {found[1] for path in paths if (found := namespaces.identity_of(path))}


def test_exited_and_zombie_processes_are_skipped(tmp_path: Path) -> None:
    for name in ("self", "17"):
        (tmp_path / name / "ns").mkdir(parents=True)
    (tmp_path / "self/ns/net").symlink_to("/proc/self/ns/net")
    (tmp_path / "17/ns/net").symlink_to("/proc/self/ns/net")
    (tmp_path / "18").mkdir()
    (tmp_path / "meminfo").touch()
    assert namespaces.network_namespaces(str(tmp_path), []) == [f"{tmp_path}/17/ns/net"]


def test_a_leftover_file_without_a_mount_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "left-over").touch()
    (tmp_path / "linked").symlink_to("/proc/self/ns/net")
    listed = namespaces.network_namespaces(run_netns=[str(tmp_path), str(tmp_path / "missing")])
    assert f"{tmp_path}/left-over" not in listed
    assert f"{tmp_path}/linked" in listed


def test_a_folder_that_is_not_procfs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        namespaces.network_namespaces(str(tmp_path))


def test_only_the_calling_thread_enters_the_namespace_and_returns(named: str) -> None:
    home, seen = own(), []
    inside, looked = threading.Event(), threading.Event()

    def look() -> None:
        inside.wait(10)
        seen.append(own())
        looked.set()

    other = threading.Thread(target=look)
    other.start()
    with open(named, "rb") as opened, namespaces.in_namespace(opened.fileno()):
        inside.set()
        assert looked.wait(10)
        assert own() == inode(named)
    other.join()
    assert own() == home
    assert seen == [home]


def test_the_thread_returns_after_an_error_inside_the_namespace(named: str) -> None:
    home = own()
    with (
        open(named, "rb") as opened,
        pytest.raises(ZeroDivisionError),
        namespaces.in_namespace(opened.fileno()),
    ):
        raise ZeroDivisionError
    assert own() == home


def test_a_descriptor_of_another_kind_of_namespace_is_rejected() -> None:
    home = own()
    with (
        open("/proc/self/ns/uts", "rb") as other,
        pytest.raises(KernelError),
        namespaces.in_namespace(other.fileno()),
    ):
        pytest.fail("entered")
    assert own() == home
