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
def steady_load(rough: Cluster, load: Load, web: Exposed) -> Iterator[None]:
    """Within the block, clients keep connecting to the Service; no connection may fail."""
    targets = load.targets("steady", [(web.v4, 80), (web.v6, 80), (rough.node.v4, web.node_port)])
    running = load.start_churn(rough.p, targets)
    try:
        yield
    except BaseException:
        running.kill()
        raise
    report = load.end_churn(running)
    assert (report["failed"], report["errors"]) == (0, {})
    assert report["attempts"] > 20  # there was a load; its rate depends on the machine


def serve(rough: Cluster, *flags: str) -> Exposed:
    rough.start(*flags)
    return rough.service(node_port=True).to(rough.a, rough.b)


def test_sigterm_leaves_forwarding_in_place(rough: Cluster) -> None:
    web = serve(rough)
    assert rough.agent.stop() == 0
    for client in (rough.p, rough.node):
        assert set(answers(client, TCP, web.v4, 80)) == {"a", "b"}
        assert outcome(client, UDP, rough.node.v4, web.node_port) in ("a", "b")


def test_no_connection_fails_over_a_crash_and_restart(rough: Cluster, load: Load) -> None:
    web = serve(rough)
    with steady_load(rough, load, web):
        for _ in range(2):
            rough.agent.kill()
            rough.start()


def test_no_connection_fails_over_a_restart_with_other_map_sizes(rough: Cluster, load: Load) -> None:
    """The new Service maps are filled before programs that use them are attached."""
    web = serve(rough)
    previous = {path.name for path in rough.lab.bpffs.glob("maps/*")}
    with steady_load(rough, load, web):
        rough.agent.kill()
        rough.start("--ebpf-services-max=4096", "--ebpf-slots-max=8192")
        eventually(
            lambda: len(list(rough.lab.bpffs.glob("programs-*"))) == 1, "the previous programs are removed"
        )
    present = {path.name for path in rough.lab.bpffs.glob("maps/*")}
    changed = {name.rpartition("-")[0].rpartition("-")[0] for name in present - previous}
    assert changed == {*SERVICE_MAPS, "traffic"}
    assert len(present) == len(previous)
    assert set(answers(rough.p, TCP, web.v4, 80)) == {"a", "b"}


def test_no_connection_fails_over_a_restart_with_other_programs(
    rough: Cluster, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other code, the same maps: the links get new programs one by one, and the maps keep their contents."""
    web = serve(rough)
    sticky = rough.service().to(
        rough.a,
        rough.b,
        sessionAffinity="ClientIP",
        sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}},
    )
    endpoint = set(answers(rough.p, TCP, sticky.v4, 80, 5))
    rough.agent.stop()
    maps = map_ids(rough.lab.bpffs)
    (previous,) = rough.lab.bpffs.glob("programs-*")
    code = other_code(tmp_path)
    monkeypatch.setattr(abi, "source_directory", lambda: code)
    with steady_load(rough, load, web), netns.entered(rough.node.netns):
        backend = EbpfBackend(EbpfSettings(rough.lab.cgroup, rough.lab.bpffs))
        backend.open()
        try:
            present = backend.read()
            hooks = backend.render((), NodePlan(frozenset(), frozenset()))
            backend.apply(diff(present, present | hooks))
        finally:
            backend.close()
    (present_programs,) = rough.lab.bpffs.glob("programs-*")
    assert present_programs != previous
    assert map_ids(rough.lab.bpffs) == maps
    assert set(answers(rough.p, TCP, sticky.v4, 80, 5)) == endpoint


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


def test_an_endpoint_removed_while_no_agent_ran_gets_no_connections(rough: Cluster) -> None:
    """Its connected UDP sockets are reconnected at the start: the agent compares state, not events."""
    web = serve(rough)
    web.to(rough.a)
    with connected(rough.p, UDP, web.v4, 53) as sock:
        assert converse(sock) == "a"
        rough.end()
        web.to(rough.b)
        rough.start()
        reaches(sock, "b")
    assert set(answers(rough.p, TCP, web.v4, 80)) == {"b"}


def test_a_service_deleted_while_no_agent_ran_is_no_longer_served(rough: Cluster) -> None:
    web = serve(rough)
    rough.end()
    rough.write(web.name)
    rough.start()
    assert outcome(rough.p, TCP, web.v4, 80, 0.3) not in ("a", "b")
    assert outcome(rough.p, TCP, rough.node.v4, web.node_port) == REFUSED


def test_node_ports_work_right_after_a_restart(rough: Cluster, load: Load) -> None:
    """Regression: calico #12192, where NodePorts were written before the host's addresses were known, and
    lost."""
    web = serve(rough)
    for _ in range(3):
        rough.agent.kill()
        rough.start()
        for address in (rough.node.v4, "10.244.2.1", rough.node.v6):
            assert outcome(rough.p, TCP, address, web.node_port) in ("a", "b")
        assert outcome(rough.node, TCP, "127.0.0.1", web.node_port) in ("a", "b")


def test_a_connected_socket_keeps_its_endpoint_over_a_restart(rough: Cluster) -> None:
    web = serve(rough)
    with connected(rough.p, TCP, web.v4, 80) as sock:
        rough.agent.kill()
        rough.start()
        assert converse(sock) in ("a", "b")
        assert sock.getpeername() == (web.v4, 80)


def test_affinity_is_kept_over_a_restart(rough: Cluster) -> None:
    rough.start()
    web = rough.service().to(rough.a, rough.b, rough.c, sessionAffinity="ClientIP")
    endpoint = set(answers(rough.p, TCP, web.v4, 80, 5))
    rough.agent.kill()
    rough.start()
    assert set(answers(rough.p, TCP, web.v4, 80, 30)) == endpoint


def test_the_agents_own_process_loads_no_compiler(rough: Cluster) -> None:
    """bcc loads clang and LLVM, 75 MB: only in the child process that compiles."""
    serve(rough, "--ebpf-affinity-max=1024")
    assert LOADED in rough.agent.log()
    mapped = Path(f"/proc/{rough.agent.process.pid}/maps").read_text()
    assert re.findall(r"lib(?:bcc|LLVM|clang)[^\n]*", mapped) == []


def test_two_agents_on_one_machine_do_not_disturb_each_other(cluster: Cluster, rough: Cluster) -> None:
    """The other node's agent already runs. Both serve the same address, each with its own pods."""
    first = serve(rough).to(rough.a)
    second = cluster.service().to(cluster.b)
    name, vip = "both-nodes", "10.96.210.1"
    for node, pod in ((rough, rough.a), (cluster, cluster.b)):
        node.write(
            name,
            manifests.service(name, [vip], [manifests.port(80)]),
            manifests.endpoint_slice(name, name, [pod.v4], [manifests.port(8080)]),
        )
    assert set(answers(rough.p, TCP, vip, 80)) == {"a"}
    assert set(answers(cluster.p, TCP, vip, 80)) == {"b"}
    rough.agent.stop()
    assert set(answers(cluster.p, TCP, second.v4, 80)) == {"b"}
    assert set(answers(rough.p, TCP, first.v4, 80)) == {"a"}
