"""Only one agent runs on a node: compiler processes left by a killed agent, and removed pins."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.agent.reconciler import REPAIRED
from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf.backend import EbpfBackend, EbpfSettings
from ebpfproxy.backends.ebpf.entries import Entry, HookKey, Key
from ebpfproxy.lab import Agent, Lab
from ebpfproxy.model.address import Address, network
from tests.kernel.clients import TCP, outcome
from tests.kernel.cluster import Cluster, eventually
from tests.support import altered
from tests.support.bpf_place import BpfPlace, bpf_place, map_ids

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


@pytest.fixture
def compiling(fresh: Cluster, tmp_path: Path) -> Agent:
    """An agent without an object file of its programs, which compiles them."""
    agent = fresh.launch(before=("env", f"--chdir={altered.with_new_programs(tmp_path)}"))
    eventually(lambda: bool(compilers_of(agent.process.pid)), "the agent compiles")
    return agent


def test_killing_the_agent_while_it_compiles_ends_the_compiler(fresh: Cluster, compiling: Agent) -> None:
    (compiler,) = compilers_of(compiling.process.pid)
    compiling.kill()
    eventually(lambda: has_ended(compiler), "the compiler ends with the agent")
    fresh.start()
    web = fresh.service().to(fresh.a)
    assert outcome(fresh.p, TCP, web.v4, 80) == "a"


def test_sigint_while_compiling_ends_the_agent_with_exit_code_0(compiling: Agent) -> None:
    for pid in (*compilers_of(compiling.process.pid), compiling.process.pid):
        os.kill(pid, 2)
    assert compiling.process.wait(60) == 0, compiling.log()


def test_removed_pins_are_restored(restartable: Cluster) -> None:
    restartable.start("--sync-period=1s")
    web = restartable.service().to(restartable.a)
    for what in ("programs-*/maps/services", "programs-*", "maps", "programs-*/maps", "maps/services-*"):
        (victim,) = restartable.lab.bpffs.glob(what)
        before = len(restartable.agent.lines)
        if victim.is_dir() and not victim.is_symlink():
            shutil.rmtree(victim)
        else:
            victim.unlink()
        restartable.agent.await_line(lambda line: REPAIRED in line.text, before)
        restartable.agent.await_sync(before)
        assert outcome(restartable.p, TCP, web.v4, 80) == "a"
        assert (restartable.lab.bpffs / "current" / "maps" / "services").exists(), what
    restartable.agent.kill()
    assert outcome(restartable.p, TCP, web.v4, 80) == "a"


def test_maps_stay_when_the_pin_of_a_program_is_removed(restartable: Cluster) -> None:
    """Bug: the folder with the links to the maps was removed first. All maps were created again, and
    established flows were lost."""
    restartable.start("--sync-period=1s")
    before, lines = map_ids(restartable.lab.bpffs), len(restartable.agent.lines)
    (victim,) = restartable.lab.bpffs.glob("programs-*/connect4")
    victim.unlink()
    restartable.agent.await_line(lambda line: REPAIRED in line.text, lines)
    restartable.agent.await_sync(lines)
    assert map_ids(restartable.lab.bpffs) == before


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
