"""Locks: who holds them, and who cannot."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.errors import AlreadyExists, Rejected
from ebpfproxy.linux import locks
from ebpfproxy.linux.bpf import object_cache
from ebpfproxy.linux.locks import FolderLock, NamespaceLock
from tests.support.confined import as_nobody
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

NOBODY = 65534
_HOLD = """
import fcntl, os, socket, sys
{what}
print("held", flush=True)
sys.stdin.read()
"""
_ADDRESSES = """
held = []
for name in ("ebpfproxy", "xtables"):  # the addresses of version 0.2 and of iptables 1.4.20
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].bind("\\0" + name)
for _ in range(100):
    held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    held[-1].setsockopt(socket.IPPROTO_IP, 15, 1)  # IP_FREEBIND
    held[-1].bind(("127.101.98.112", 0))
"""
_LOCK = "from ebpfproxy.linux.locks import NamespaceLock; lock = NamespaceLock()"
_RACE = """
import sys, time
from ebpfproxy.errors import AlreadyExists
from ebpfproxy.linux.locks import NamespaceLock
print("ready", flush=True)
for line in sys.stdin:
    try:
        lock = NamespaceLock(patience=0.5)
    except AlreadyExists:
        print("excluded", flush=True)
    else:
        print("holds", flush=True)
        sys.stdin.readline()
        lock.release()
"""


@pytest.fixture
def here() -> Iterator[Namespace]:
    """A network namespace that the calling thread is in. Its loopback is down."""
    with namespace("locks") as created, created.entered():
        yield created


@contextlib.contextmanager
def holding(what: str, *before: str) -> Iterator[None]:
    """Another process, started after the command `before`, runs the code `what` and keeps its files open."""
    command = [*before, sys.executable, "-c", _HOLD.format(what=what)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.communicate()


@pytest.mark.parametrize("before", [as_nobody(), [*as_nobody(), "unshare", "--user", "--map-root-user"]])
def test_other_users_cannot_hold_the_lock_of_a_network_namespace(before: list[str], here: Namespace) -> None:
    """Bug: the locks were abstract addresses of unix(7), which any user may bind. Root of a user namespace is
    another user, too."""
    with holding(_ADDRESSES, *before):
        first = NamespaceLock(0)
        with pytest.raises(AlreadyExists):
            NamespaceLock(0)
        first.release()


@pytest.mark.parametrize("before", [[], ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--ipc"]])
def test_agents_in_the_same_network_namespace_exclude_each_other(before: list[str], here: Namespace) -> None:
    """They may be in containers, which share nothing but the network namespace."""
    with holding(_LOCK, *before), pytest.raises(AlreadyExists, match="this network namespace"):
        NamespaceLock(0.1)
    NamespaceLock().release()


def test_an_agent_of_another_user_excludes_itself_and_sees_that_of_root(here: Namespace) -> None:
    root = NamespaceLock()
    done = subprocess.run([*as_nobody(), sys.executable, "-c", _LOCK], capture_output=True, check=False)
    assert b"another ebpfproxy agent runs" in done.stderr
    root.release()
    with holding(_LOCK, *as_nobody()):
        done = subprocess.run([*as_nobody(), sys.executable, "-c", _LOCK], capture_output=True, check=False)
        assert b"another ebpfproxy agent runs" in done.stderr


def test_of_agents_that_start_at_the_same_time_one_gets_the_lock(here: Namespace) -> None:
    """None would, if each gave way to the others; several would, if each tried before it binds."""
    command = [sys.executable, "-c", _RACE]
    with contextlib.ExitStack() as stack:
        racers = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            )
            for _ in range(5)
        ]
        pipes = [(each.stdin, each.stdout) for each in racers if each.stdin and each.stdout]
        for _, answers in pipes:
            assert answers.readline() == "ready\n"
        for _ in range(10):
            for requests, _ in pipes:
                requests.write("start\n")
            results = [answers.readline().strip() for _, answers in pipes]
            assert sorted(results) == ["excluded"] * 4 + ["holds"]
            pipes[results.index("holds")][0].write("release\n")
        for requests, _ in pipes:
            requests.close()


@pytest.mark.parametrize(("port", "stays"), [(1, False), (65535, True)])
def test_of_two_sockets_that_are_bound_at_the_same_time_the_lower_port_stays(
    port: int, stays: bool, here: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = locks._bound
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:

        def bind_both() -> socket.socket:
            own = bind()
            if other.fileno() >= 0:
                other.setsockopt(socket.IPPROTO_IP, locks._IP_FREEBIND, 1)
                other.bind((locks._ADDRESS, port))
            return own

        meanwhile: list[set[int]] = []

        def sleep(_seconds: float) -> None:
            meanwhile.append(locks._ports())
            other.close()

        monkeypatch.setattr(locks, "_bound", bind_both)
        monkeypatch.setattr(time, "sleep", sleep)
        NamespaceLock().release()
        assert port in meanwhile[0]
        assert len(meanwhile[0]) == 1 + stays


def test_a_killed_holder_releases_the_lock(here: Namespace) -> None:
    code = _HOLD.format(what=_LOCK)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(AlreadyExists):
            NamespaceLock(0)
        holder.kill()
        holder.wait()
    NamespaceLock(0).release()


def test_a_kernel_that_does_not_show_the_lock_is_an_error(
    here: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "udp"
    empty.write_text("")
    monkeypatch.setattr(locks, "_SOCKETS", empty)
    with pytest.raises(Rejected, match="does not show the lock"):
        NamespaceLock(0)


def test_each_network_namespace_has_its_own_lock() -> None:
    with namespace("one") as one, namespace("other") as other:
        with one.entered():
            first = NamespaceLock()
            with pytest.raises(AlreadyExists, match="this network namespace"):
                NamespaceLock()
        with other.entered():
            NamespaceLock().release()
        with one.entered():
            first.release()
            first.release()
            NamespaceLock().release()


def test_a_released_folder_lock_can_be_taken_again(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(AlreadyExists, match=str(tmp_path)):
        FolderLock(tmp_path)
    first.release()
    first.release()
    FolderLock(tmp_path).release()


def test_a_lock_inherited_by_a_child_process_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a mode was not drained because a child process of the previous agent, which had ended,
    still held its lock."""
    first = FolderLock(tmp_path)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(first.fd,)) as started:
        first.release()
        monkeypatch.setattr(time, "sleep", lambda _seconds: started.communicate())
        FolderLock(tmp_path).release()
        assert started.returncode == 0, "the lock was held until this process ended"


def test_other_users_cannot_hold_the_lock_of_a_folder(tmp_path: Path) -> None:
    """A bpffs that was mounted without options gives every user the permission to read."""
    tmp_path.chmod(0o755)
    FolderLock(tmp_path).release()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_rejected(tmp_path: Path) -> None:
    """In a folder that every user may write to, such as a bpffs that was mounted without options."""
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(Rejected, match=f"belongs to user {NOBODY}") as failure:
        FolderLock(tmp_path)
    assert "mode=0700" in failure.value.hint


def test_other_users_cannot_hold_the_lock_of_a_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would delay each start without an object file by a minute."""
    monkeypatch.setattr(object_cache, "FOLDER", tmp_path)
    with object_cache._locked("digest"):
        assert (tmp_path / "digest.lock").stat().st_mode & 0o077 == 0
