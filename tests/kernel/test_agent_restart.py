"""The agent ends and starts again (crash, upgrade, operator): the kernel keeps forwarding."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.backend import EbpfBackend, EbpfSettings
from ebpfproxy.backends.ebpf.migration.map_shapes import SERVICE_MAPS
from ebpfproxy.backends.ebpf.programs import LOADED
from ebpfproxy.bench.load import Load
from ebpfproxy.lab import manifests
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netns import netns
from ebpfproxy.plan.service_plan import NodePlan
from tests.kernel.clients import REFUSED, TCP, UDP, answers, connected, converse, outcome
from tests.kernel.cluster import Cluster, Exposed, eventually
from tests.kernel.test_socket_stale import reaches

pytestmark = pytest.mark.kernel


@contextlib.contextmanager
def steady_load(restartable: Cluster, load: Load, web: Exposed) -> Iterator[None]:
    """Within the block, clients keep connecting to the Service; no connection may fail."""
    targets = load.targets("steady", [(web.v4, 80), (web.v6, 80), (restartable.node.v4, web.node_port)])
    running = load.start_churn(restartable.p, targets)
    try:
        yield
    except BaseException:
        running.kill()
        raise
    report = load.end_churn(running)
    assert (report["failed"], report["errors"]) == (0, {})
    assert report["attempts"] > 20  # there was a load; its rate depends on the machine


def serve(restartable: Cluster, *flags: str) -> Exposed:
    restartable.start(*flags)
    return restartable.service(node_port=True).to(restartable.a, restartable.b)


def test_sigterm_leaves_forwarding_in_place(restartable: Cluster) -> None:
    web = serve(restartable)
    assert restartable.agent.stop() == 0
    for client in (restartable.p, restartable.node):
        assert set(answers(client, TCP, web.v4, 80)) == {"a", "b"}
        assert outcome(client, UDP, restartable.node.v4, web.node_port) in ("a", "b")


def test_no_connection_fails_over_a_crash_and_restart(restartable: Cluster, load: Load) -> None:
    web = serve(restartable)
    with steady_load(restartable, load, web):
        for _ in range(2):
            restartable.agent.kill()
            restartable.start()


def test_no_connection_fails_over_a_restart_with_other_map_sizes(restartable: Cluster, load: Load) -> None:
    """The new Service maps are filled before programs that use them are attached."""
    web = serve(restartable)
    previous = {path.name for path in restartable.lab.bpffs.glob("maps/*")}
    with steady_load(restartable, load, web):
        restartable.agent.kill()
        restartable.start("--ebpf-services-max=4096", "--ebpf-slots-max=8192")
        eventually(
            lambda: len(list(restartable.lab.bpffs.glob("programs-*"))) == 1,
            "the previous programs are removed",
        )
    present = {path.name for path in restartable.lab.bpffs.glob("maps/*")}
    changed = {name.rpartition("-")[0].rpartition("-")[0] for name in present - previous}
    assert changed == set(SERVICE_MAPS)
    assert len(present) == len(previous)
    assert set(answers(restartable.p, TCP, web.v4, 80)) == {"a", "b"}


def test_no_connection_fails_over_a_restart_with_other_programs(
    restartable: Cluster, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other code, the same maps: the links get new programs one by one, and the maps keep their contents."""
    web = serve(restartable)
    sticky = restartable.service().to(restartable.a, restartable.b, sessionAffinity="ClientIP")
    endpoint = set(answers(restartable.p, TCP, sticky.v4, 80, 5))
    restartable.agent.stop()
    maps = map_ids(restartable.lab.bpffs)
    (previous,) = restartable.lab.bpffs.glob("programs-*")
    code = other_code(tmp_path)
    monkeypatch.setattr(abi, "source_directory", lambda: code)
    with steady_load(restartable, load, web), netns.entered(restartable.node.netns):
        backend = EbpfBackend(EbpfSettings(restartable.lab.cgroup, restartable.lab.bpffs))
        backend.open()
        try:
            present = backend.read()
            hooks = backend.render((), NodePlan(frozenset(), frozenset()))
            backend.apply(diff(present, present | hooks))
        finally:
            backend.close()
    (present_programs,) = restartable.lab.bpffs.glob("programs-*")
    assert present_programs != previous
    assert map_ids(restartable.lab.bpffs) == maps
    assert set(answers(restartable.p, TCP, sticky.v4, 80, 5)) == endpoint


def map_ids(bpffs: Path) -> dict[str, int]:
    """Map ids by pin: a recreated map has another id."""
    found = {}
    for path in (bpffs / "maps").iterdir():
        with contextlib.closing(Map.pinned(path)) as opened:
            found[path.name] = opened.shape.id
    return found


def other_code(folder: Path) -> Path:
    """A copy of the C sources with a change without effect on tests."""
    for path in abi.source_directory().rglob("*"):
        if path.is_file():
            copy = folder / path.relative_to(abi.source_directory())
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    abi_h = folder / "abi.h"
    abi_h.write_text(abi_h.read_text().replace("/* Key of `services`:", "/* The key of `services`:"))
    service = folder / "service.h"
    service.write_text(service.read_text().replace("attempt < 3", "attempt < 2"))
    return folder


def test_an_endpoint_removed_while_no_agent_ran_gets_no_connections(restartable: Cluster) -> None:
    """Its connected UDP sockets are reconnected at the start: the agent compares state, not events."""
    web = serve(restartable)
    web.to(restartable.a)
    with connected(restartable.p, UDP, web.v4, 53) as sock:
        assert converse(sock) == "a"
        restartable.end()
        web.to(restartable.b)
        restartable.start()
        reaches(sock, "b")
    assert set(answers(restartable.p, TCP, web.v4, 80)) == {"b"}


def test_a_service_deleted_while_no_agent_ran_is_no_longer_served(restartable: Cluster) -> None:
    web = serve(restartable)
    restartable.end()
    restartable.write(web.name)
    restartable.start()
    assert outcome(restartable.p, TCP, web.v4, 80, 0.3) not in ("a", "b")
    assert outcome(restartable.p, TCP, restartable.node.v4, web.node_port) == REFUSED


def test_node_ports_work_right_after_a_restart(restartable: Cluster, load: Load) -> None:
    """Regression: calico #12192, where NodePorts were written before the host's addresses were known, and
    lost."""
    web = serve(restartable)
    for _ in range(3):
        restartable.agent.kill()
        restartable.start()
        for address in (restartable.node.v4, "10.244.2.1", restartable.node.v6):
            assert outcome(restartable.p, TCP, address, web.node_port) in ("a", "b")
        assert outcome(restartable.node, TCP, "127.0.0.1", web.node_port) in ("a", "b")


def test_a_connected_socket_keeps_its_endpoint_over_a_restart(restartable: Cluster) -> None:
    web = serve(restartable)
    with connected(restartable.p, TCP, web.v4, 80) as sock:
        restartable.agent.kill()
        restartable.start()
        assert converse(sock) in ("a", "b")
        assert sock.getpeername() == (web.v4, 80)


def test_affinity_is_kept_over_a_restart(restartable: Cluster) -> None:
    restartable.start()
    web = restartable.service().to(restartable.a, restartable.b, restartable.c, sessionAffinity="ClientIP")
    endpoint = set(answers(restartable.p, TCP, web.v4, 80, 5))
    restartable.agent.kill()
    restartable.start()
    assert set(answers(restartable.p, TCP, web.v4, 80, 30)) == endpoint


def test_the_agents_own_process_loads_no_compiler(restartable: Cluster) -> None:
    """bcc loads clang and LLVM, 75 MB: only in the child process that compiles."""
    serve(restartable, "--ebpf-affinity-max=1024")
    assert LOADED in restartable.agent.log()
    mapped = Path(f"/proc/{restartable.agent.process.pid}/maps").read_text()
    assert re.findall(r"lib(?:bcc|LLVM|clang)[^\n]*", mapped) == []


def test_two_agents_on_one_machine_do_not_disturb_each_other(cluster: Cluster, restartable: Cluster) -> None:
    """The other node's agent already runs. Both serve the same address, each with its own pods."""
    first = serve(restartable).to(restartable.a)
    second = cluster.service().to(cluster.b)
    name, vip = "both-nodes", "10.96.210.1"
    for node, pod in ((restartable, restartable.a), (cluster, cluster.b)):
        node.write(
            name,
            manifests.service(name, [vip], [manifests.port(80)]),
            manifests.endpoint_slice(name, name, [pod.v4], [manifests.port(8080)]),
        )
    assert set(answers(restartable.p, TCP, vip, 80)) == {"a"}
    assert set(answers(cluster.p, TCP, vip, 80)) == {"b"}
    restartable.agent.stop()
    assert set(answers(cluster.p, TCP, second.v4, 80)) == {"b"}
    assert set(answers(restartable.p, TCP, first.v4, 80)) == {"a"}
