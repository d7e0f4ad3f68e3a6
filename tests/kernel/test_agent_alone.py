"""Only one agent runs on a node: locks, compiler processes left by a killed agent, and removed pins."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf.backend import EbpfBackend, EbpfSettings
from ebpfproxy.backends.ebpf.entries import Entry, HookKey, Key
from ebpfproxy.errors import AlreadyExists
from ebpfproxy.lab import Lab
from ebpfproxy.linux.locks import FolderLock, NamespaceLock
from ebpfproxy.model.address import Address, network
from tests.kernel.clients import TCP, outcome
from tests.kernel.cluster import Cluster, eventually
from tests.support.bpf_place import BpfPlace, bpf_place
from tests.support.namespace import namespace

pytestmark = pytest.mark.kernel


@pytest.fixture
def fresh() -> Iterator[Cluster]:
    """A node on which no BPF program was ever loaded."""
    with Lab("test-alone", 3) as lab, Cluster(lab) as cluster:
        yield cluster


@pytest.fixture
def place() -> Iterator[BpfPlace]:
    with bpf_place() as created:
        yield created


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--proxy-mode=iptables"], "another ebpfproxy agent runs in this network namespace"),
        (["--tc-devices=none"], "another ebpfproxy holds {root}"),
    ],
)
def test_a_second_agent_exits_with_an_error(restartable: Cluster, flags: list[str], reason: str) -> None:
    """Two agents would assign the same slots and endpoints to different Services, or remove each other's
    state in the network namespace."""
    restartable.start()
    web = restartable.service().to(restartable.a)
    ports = "--healthz-port=0", "--metrics-port=0"
    second = restartable.ebpfproxy("run", f"--manifests={restartable.folder}", *ports, *flags, check=False)
    assert second.returncode == 4
    assert reason.format(root=restartable.lab.bpffs) in second.stderr
    assert outcome(restartable.p, TCP, web.v4, 80) == "a"


def test_cleanup_is_rejected_while_an_agent_runs(restartable: Cluster) -> None:
    restartable.start()
    web = restartable.service().to(restartable.a)
    rejected = restartable.ebpfproxy("cleanup", check=False)
    assert rejected.returncode == 4
    assert "stop the agent" in rejected.stderr
    assert outcome(restartable.p, TCP, web.v4, 80) == "a"
    restartable.agent.stop()
    done = restartable.ebpfproxy("cleanup", check=False)
    assert done.returncode == 0
    assert "removed link connect4" in done.stdout
    assert "removed program" not in done.stdout
    assert outcome(restartable.p, TCP, web.v4, 80, 0.2) != "a"


def compilers_of(agent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if words else 0
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == agent and b"ebpfproxy.linux.bpf.compiler" in words:
            found.append(int(entry.name))
    return found


def has_ended(pid: int) -> bool:
    """Also true for a zombie: the process that inherits a killed agent's child may reap it late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except FileNotFoundError:
        return True


def test_killing_the_agent_while_it_compiles_ends_the_compiler(fresh: Cluster) -> None:
    agent = fresh.launch()
    eventually(lambda: bool(compilers_of(agent.process.pid)), "the agent compiles")
    (compiler,) = compilers_of(agent.process.pid)
    agent.kill()
    eventually(lambda: has_ended(compiler), "the compiler ends with the agent")
    fresh.start()
    web = fresh.service().to(fresh.a)
    assert outcome(fresh.p, TCP, web.v4, 80) == "a"


def test_sigint_while_compiling_ends_the_agent_with_exit_code_0(fresh: Cluster) -> None:
    agent = fresh.launch()
    eventually(lambda: bool(compilers_of(agent.process.pid)), "the agent compiles")
    for pid in (*compilers_of(agent.process.pid), agent.process.pid):
        os.kill(pid, 2)
    assert agent.process.wait(20) == 0, agent.log()


@pytest.mark.parametrize(
    "what", ["programs-*/maps/services", "programs-*/maps", "programs-*", "maps/services-*", "maps"]
)
def test_removed_pins_are_restored(restartable: Cluster, what: str) -> None:
    restartable.start("--sync-period=1s")
    web = restartable.service().to(restartable.a)
    (victim,) = restartable.lab.bpffs.glob(what)
    before = len(restartable.agent.lines)
    if victim.is_dir() and not victim.is_symlink():
        shutil.rmtree(victim)
    else:
        victim.unlink()
    restartable.agent.await_sync(before)
    assert outcome(restartable.p, TCP, web.v4, 80) == "a"
    restartable.agent.kill()
    assert outcome(restartable.p, TCP, web.v4, 80) == "a"
    assert (restartable.lab.bpffs / "current" / "maps" / "services").exists()


def test_local_networks_beyond_the_map_size_are_rejected(place: BpfPlace) -> None:
    """A node that ran mode ipvs has every ClusterIP on kube-ipvs0."""
    backend = EbpfBackend(EbpfSettings(place.cgroup, place.bpffs, devices=False))
    backend.open()
    try:
        prefix = b"\xfd" + bytes(11)
        desired: dict[Key, Entry] = {
            network(Address(prefix + number.to_bytes(4)), 128): 1 for number in range(65_540)
        }
        hooks = {HookKey(hook): "attached" for hook in ("connect4", "connect6")}
        rejected = backend.apply(diff({}, desired | hooks))
        assert len(rejected) == 4
        assert all("local_networks" in failure.message for failure in rejected.values())
        assert hooks.items() <= backend.read().items()
    finally:
        backend.close()


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
