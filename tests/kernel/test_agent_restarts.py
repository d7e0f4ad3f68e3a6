"""The agent ends, things change, and it starts again: what continues, and what is caught up on.

Step 1 creates Services, step 2 is for clients to connect, step 3 takes place while no agent runs. All
scenarios have these steps in common, so that a mode needs one restart.
"""

import contextlib
import functools
import itertools
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpfproxy.agent.daemon import ENDING
from ebpfproxy.agent.ending import NOT_ENDED
from ebpfproxy.agent.initialize import INITIALIZED
from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.backend import EbpfBackend, EbpfSettings
from ebpfproxy.backends.ebpf.migration.map_shapes import SERVICE_MAPS
from ebpfproxy.backends.ebpf.programs import LOADED
from ebpfproxy.bench.load import Load
from ebpfproxy.diagnose.doctor.other_proxies import LEFT_OVER
from ebpfproxy.lab import Pod, manifests
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netlink.conntrack import Flow
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import format_address
from ebpfproxy.plan.service_plan import NodePlan
from tests.kernel.clients import (
    REFUSED,
    TCP,
    UDP,
    answers,
    ask_from,
    connected,
    converse,
    family_of,
    socket_in,
)
from tests.kernel.cluster import UDP_TARGET, Cluster, Exposed, eventually
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.kernel.scenarios import PORTS, Row, Scenarios, Stage, Steps
from tests.kernel.test_socket_stale import reaches
from tests.support.bpf_place import map_ids

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(1800)]


class Way(NamedTuple):
    """A mode, its flags, and those that are added at the restart."""

    mode: str
    flags: tuple[str, ...] = ("--iptables-min-sync-period=0s",)
    added: tuple[str, ...] = ()


_LEGACY, _NFT = "--iptables-backend=legacy", "--iptables-backend=nft"
_SIZES = {"services": 4096, "slots": 8192, "affinity": 4096, "sockets": 100_000}
WAYS = {
    "ebpf": Way("ebpf"),
    "ebpf-sizes": Way("ebpf", added=tuple(f"--ebpf-{name}-max={size}" for name, size in _SIZES.items())),
    "nftables": Way("nftables"),
    "iptables-legacy": Way("iptables", (*Way("").flags, _LEGACY)),
    "iptables-nft": Way("iptables", (*Way("").flags, _NFT)),
    "ipvs": Way("ipvs", (_LEGACY,)),
}


class Restarted(Stage):
    def __init__(self, cluster: Cluster, load: Load) -> None:
        super().__init__(cluster)
        self.load = load

    def two(self, **spec: object) -> Exposed:
        return self.service(self.cluster.a, self.cluster.b, node_port=True, **spec)


scenario: Scenarios[Restarted] = Scenarios()


@pytest.mark.parametrize("way", WAYS)
def test_a_restart_in_each_scenario(restartable: Cluster, load: Load, way: str) -> None:
    restartable.mode, flags, added = WAYS[way]
    skip_without_ipvs(restartable.mode)
    restartable.start(*flags)
    if added:
        restarts = {3: crashed(restartable, *flags, *added), 7: crashed(restartable, *flags)}
    else:
        restarts = {3: ended(restartable, *flags)}
    scenario.run(restartable, lambda: Restarted(restartable, load), restarts)


@contextlib.contextmanager
def ended(cluster: Cluster, *flags: str) -> Iterator[None]:
    """The agent ends by SIGTERM before the block, and starts after it with the same maps and programs."""
    previous, agent = pins(cluster), cluster.agent
    assert agent.stop() == 0
    assert not agent_lines(agent.log(), NOT_ENDED)
    (line,) = agent_lines(agent.log(), ENDING)
    assert line.endswith(" forwarding=continues")
    cluster.end()
    yield
    cluster.start(*flags)
    assert pins(cluster) == previous


@contextlib.contextmanager
def crashed(cluster: Cluster, *flags: str) -> Iterator[None]:
    """The agent is killed before the block, and starts after it with other maps and programs."""
    previous = pins(cluster)
    cluster.end()
    yield
    cluster.start(*flags)
    eventually(lambda: len(pins(cluster)) == len(previous), "the previous maps and programs are removed")
    assert len(pins(cluster) - previous) > len(SERVICE_MAPS)


def pins(cluster: Cluster) -> set[str]:
    """The names of the folders of programs, and of maps."""
    found = (*cluster.lab.bpffs.glob("programs-*"), *cluster.lab.bpffs.glob("maps/*"))
    return {path.name for path in found}


def agent_lines(log: str, message: str) -> list[str]:
    return [line for line in log.splitlines() if f" {message} " in line]


# Clients


@scenario
def no_connection_fails(at: Restarted) -> Steps:
    web = at.two()
    yield ()
    with steady_load(at.cluster, at.load, web):
        yield ()
        yield ()


@contextlib.contextmanager
def steady_load(cluster: Cluster, load: Load, web: Exposed) -> Iterator[None]:
    """Within the block, clients keep connecting to the Service; no connection may fail. A socket map has room
    for the peers of the last 100,000 TCP connections, so the rate is limited."""
    targets = load.targets("steady", [(web.v4, 80), (web.v6, 80), (cluster.node.v4, web.node_port)])
    running = load.start_churn(cluster.p, targets, rate=200.0)
    try:
        yield
    except BaseException:
        running.kill()
        raise
    report = load.end_churn(running)
    assert (report["failed"], report["errors"]) == (0, {})
    assert report["attempts"] > 20  # there was a load; its rate depends on the machine


@scenario
def forwarding_continues_without_an_agent_and_at_once_after_its_start(at: Restarted) -> Steps:
    """Regression: calico #12192, where NodePorts were written before the host's addresses were known, and
    lost."""
    web, cluster = at.two(), at.cluster
    both = {"a", "b"}
    yield ()
    yield ()
    for client in at.clients:
        assert set(answers(client, TCP, web.v4, 80)) == both
        assert set(answers(client, UDP, cluster.node.v4, web.node_port)) == both
    node_ports = [
        row
        for address in (cluster.node.v4, cluster.node.v6, *cluster.lab.addresses.gateway(0))
        for row in at.node_port(web, address, both)
    ]
    yield *node_ports, *at.cluster_ip(web, both)


@scenario
def connections_keep_their_endpoint(at: Restarted) -> Steps:
    """And the sockets their peer: in mode ebpf, also for datagrams."""
    cluster, web, replaced = at.cluster, at.two(), at.two()
    yield ()
    at.remove(replaced)  # new maps would assign other ids
    dials = [(TCP, cluster.p), (TCP, cluster.node), (UDP, cluster.p), (UDP, cluster.node)]
    with contextlib.ExitStack() as opened:
        socks = {}
        for (protocol, client), address in itertools.product(dials, (web.v4, web.v6)):
            peer = address, PORTS[protocol]
            socks[opened.enter_context(connected(client, protocol, *peer))] = peer
        before = [converse(sock) for sock in socks]
        yield ()
        yield ()
        assert [converse(sock) for sock in socks] == before
        assert [sock.getpeername()[:2] for sock in socks] == list(socks.values())
        for sock, peer in socks.items():
            if sock.type == socket.SOCK_DGRAM:
                assert sock.send(b"?")
                assert sock.recvfrom(100)[1][:2] == peer


@scenario.only("ebpf")
def a_late_reply_comes_from_the_service_address(at: Restarted) -> Steps:
    """The request is sent before the restart, the reply after it."""
    cluster, web = at.cluster, at.service(at.cluster.q)
    yield ()
    with contextlib.ExitStack() as opened:
        pairs = []
        for address in (web.v4, web.v6):
            server, client = (
                opened.enter_context(socket_in(pod, UDP, family_of(address)))
                for pod in (cluster.q, cluster.p)
            )
            server.bind((cluster.q.v4 if address == web.v4 else cluster.q.v6, UDP_TARGET))
            client.sendto(b"?", (address, 53))
            pairs.append((server, client, server.recvfrom(100)[1], address))
        yield ()
        yield ()
        for server, client, seen, address in pairs:
            server.sendto(b"late", seen)
            answer, source = client.recvfrom(100)
            assert (answer, source[:2]) == (b"late", (address, 53))
        web.backends = (cluster.b,)
        yield ()
        for _, client, _, address in pairs:
            assert ask_from(client, address, 53) == ("b", (address, 53))


@scenario
def clients_with_session_affinity_keep_their_endpoint(at: Restarted) -> Steps:
    """Also over a second restart, with the first flags. If three clients chose again twice, they would choose
    the same endpoints in one of 729 runs."""
    cluster = at.cluster
    web = at.service(cluster.a, cluster.b, cluster.c, sessionAffinity="ClientIP")

    def chosen() -> list[set[str]]:
        clients = cluster.p, cluster.q, cluster.node
        return [set(answers(client, TCP, to, 80, 5)) for client in clients for to in (web.v4, web.v6)]

    yield ()
    before = chosen()
    assert {len(each) for each in before} == {1}
    for _ in range(2, 8):
        yield ()
        assert chosen() == before


# Changes while no agent runs


@scenario
def a_deleted_service_is_not_served(at: Restarted) -> Steps:
    web, cluster = at.two(), at.cluster
    yield at.cluster_ip(web, {"a", "b"})
    yield ()
    at.remove(web)
    yield (
        at.row(cluster.p, TCP, web.v4, 80, at.differences.without_service),
        at.row(cluster.p, TCP, cluster.node.v4, web.node_port, REFUSED),
    )


@scenario
def a_flow_leaves_a_removed_endpoint(at: Restarted) -> Steps:
    """The agent compares state, not events."""
    web, cluster = at.service(at.cluster.a), at.cluster
    yield ()
    with connected(cluster.p, UDP, web.v4, 53) as sock:
        assert converse(sock) == "a"
        yield ()
        web.backends = (cluster.b,)
        yield at.cluster_ip(web, {"b"})
        reaches(sock, "b")


@scenario.only("ebpf")
def a_socket_gets_the_first_endpoint(at: Restarted) -> Steps:
    web, cluster = at.service(), at.cluster
    yield ()
    with connected(cluster.p, UDP, web.v4, 53) as sock:
        yield ()
        web.backends = (cluster.a,)
        yield ()
        reaches(sock, "a")


@scenario.only("ebpf")
def a_socket_leaves_an_endpoint_that_is_removed_after_the_restart(at: Restarted) -> Steps:
    web, cluster = at.service(at.cluster.a), at.cluster
    yield ()
    with connected(cluster.p, UDP, web.v6, 53) as lost, connected(cluster.p, TCP, web.v6, 80) as stream:
        assert (converse(lost), converse(stream)) == ("a", "a")
        yield ()
        yield ()
        assert converse(lost) == "a"
        web.backends = cluster.a, cluster.b
        yield ()
        with connected(cluster.p, UDP, web.v6, 53) as kept:
            while converse(kept) != "b":
                kept.connect((web.v6, 53))
            web.backends = (cluster.b,)
            yield ()
            reaches(lost, "b")
            assert (converse(kept), converse(stream)) == ("b", "a")


FOREIGN = "198.51.100.53"
REMEMBERED = "600"
"""Seconds for which connection tracking keeps an idle UDP flow. An agent in a VM may take longer to start
than the default of 30 s."""


@scenario.only("nftables", "iptables", "ipvs")
def only_the_flows_of_a_deleted_service_are_ended(at: Restarted) -> Steps:
    """Regression: kubernetes issue 139628: a client that keeps sending keeps its flow for ever."""
    cluster = at.cluster
    for name in ("nf_conntrack_udp_timeout", "nf_conntrack_udp_timeout_stream"):
        cluster.node.call(functools.partial(sysctl.ensure, f"net/netfilter/{name}", REMEMBERED))
    deleted, kept = at.service(cluster.a, node_port=True), at.service(cluster.a)
    yield ()
    with foreign_service(cluster, cluster.b), contextlib.ExitStack() as opened:

        def dial(pod: Pod, address: str, port: int = 53) -> socket.socket:
            client = opened.enter_context(connected(pod, UDP, address, port))
            assert converse(client) in ("a", "b")
            return client

        clients = {each: dial(cluster.p, each) for each in (deleted.v4, deleted.v6, kept.v4, FOREIGN)}
        dial(cluster.lab.outside, cluster.node.v4, deleted.node_port)
        before = {each: flows(cluster, each) for each in (kept.v4, FOREIGN)}
        yield ()
        at.remove(deleted)
        for each in clients:
            assert flows(cluster, each), "the kernel keeps the flow"
        yield ()
        for address in (deleted.v4, deleted.v6):
            eventually(lambda of=address: not flows(cluster, of), f"flows to {address} are ended")  # type: ignore[misc]
        eventually(lambda: not flows(cluster, cluster.node.v4, deleted.node_port), "flows to the NodePort")
        assert {each: flows(cluster, each) for each in before} == before
        assert converse(clients[FOREIGN]) == "b"
        assert converse(clients[kept.v4]) == "a"
        ended = cluster.metric("kubeproxy_conntrack_reconciler_deleted_entries_total")
        assert ended >= 3 or cluster.mode == "ipvs"  # IPVS ends them together with the virtual server


def flows(cluster: Cluster, destination: str, port: int = 53) -> list[Flow]:
    """The flows to an address and port, translated or not."""
    found = cluster.node.call(lambda: list(conntrack.flows(UDP)))
    return [
        flow
        for flow in found
        if (format_address(flow.destination), flow.destination_port) == (destination, port)
    ]


@contextlib.contextmanager
def foreign_service(cluster: Cluster, pod: Pod) -> Iterator[None]:
    """Within the block, foreign rules translate FOREIGN to a pod."""
    rule = f"ip daddr {FOREIGN} udp dport 53 dnat to {pod.v4}:{UDP_TARGET}"
    text = f"table ip others {{ chain pre {{ type nat hook prerouting priority -90; {rule}; }}; }}"
    cluster.node.run(["nft", "-f", "-"], stdin=text)
    try:
        yield
    finally:
        cluster.node.run(["nft", "delete", "table", "ip", "others"])


@scenario
def health_checks_open_and_close_with_their_service(at: Restarted) -> Steps:
    """Regression: calico #8112: after a restart the proxy did not know its previous sockets."""
    spec = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
    stays, goes = (at.two(healthCheckNodePort=port, **spec) for port in (32101, 32102))
    outside, node = at.cluster.lab.outside, at.cluster.node

    def is_open(port: int) -> bool:
        return outside.call(lambda: _is_open(f"http://{node.v4}:{port}/healthz"))

    yield ()
    eventually(lambda: is_open(32101) and is_open(32102), "they answer")
    yield ()
    assert not is_open(32101)
    at.remove(goes)
    yield ()
    eventually(lambda: is_open(32101), "it answers after a restart")
    assert not is_open(32102)
    at.remove(stays)
    yield ()
    eventually(lambda: not is_open(32101), "a deleted Service's port is closed")
    at.add(goes)
    yield ()
    eventually(lambda: is_open(32102), "it answers again")


def _is_open(url: str) -> bool:
    try:
        return int(urllib.request.urlopen(url, timeout=5).status) == 200
    except urllib.error.HTTPError:
        return False
    except OSError:
        return False


# Other programs


@scenario.only("ebpf", "nftables")
def init_only_prepares_the_kernel_and_keeps_what_is_served(at: Restarted) -> Steps:
    web, cluster = at.service(at.cluster.a), at.cluster
    yield ()
    yield ()
    flags = ["--init-only", f"--proxy-mode={cluster.mode}", "--manifests=/nonexistent"]
    ended = cluster.ebpfproxy("run", *flags)
    assert f" {INITIALIZED} mode={cluster.mode}" in ended.stderr
    assert set(answers(cluster.p, TCP, web.v4, 80, 5)) == {"a"}
    yield ()


@scenario.only("ebpf")
def doctor_reports_what_a_stopped_agent_has_left(at: Restarted) -> Steps:
    def details() -> list[str]:
        found = at.cluster.ebpfproxy("doctor", "--proxy-mode=ebpf", "-o", "json", check=False)
        return [each["detail"] for each in json.loads(found.stdout)["checks"] if each["feature"] == LEFT_OVER]

    at.service(at.cluster.a)
    yield ()
    assert details() == []
    yield ()
    (detail,) = details()
    assert detail.startswith("nothing updates what a stopped proxy has left in force: ")
    assert "of mode ebpf: link " in detail
    yield ()


@scenario.only("ebpf")
def a_second_agent_exits_with_an_error(at: Restarted) -> Steps:
    """Two agents would assign the same slots and endpoints to different Services, or remove each other's
    state in the network namespace."""
    cluster, web = at.cluster, at.service(at.cluster.a)
    yield ()
    for flag, reason in (
        ("--proxy-mode=iptables", "another ebpfproxy agent runs in this network namespace"),
        ("--tc-devices=none", f"another ebpfproxy holds {cluster.lab.bpffs}"),
    ):
        flags = f"--manifests={cluster.folder}", "--healthz-port=0", "--metrics-port=0", flag
        second = cluster.ebpfproxy("run", *flags, check=False)
        assert second.returncode == 4
        assert reason in second.stderr
    rejected = cluster.ebpfproxy("cleanup", check=False)
    assert rejected.returncode == 4
    assert "stop the agent" in rejected.stderr
    yield [Row(cluster.p, TCP, web.v4, 80, "a")]


# Other tests


def serve(restartable: Cluster, *flags: str) -> Exposed:
    restartable.start(*flags)
    return restartable.service(node_port=True).to(restartable.a, restartable.b)


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
