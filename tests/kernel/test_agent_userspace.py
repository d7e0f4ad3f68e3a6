"""The agent in mode userspace: mode switches, its end, cleanup, and what commands show."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from ebpfproxy.agent.mode_switch import SWITCHED
from ebpfproxy.backends.userspace.messages import NAME
from ebpfproxy.backends.userspace.relays import REPLACED
from ebpfproxy.bench.load import Load
from ebpfproxy.linux.processes import children
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, answers, connected, converse, outcome
from tests.kernel.cluster import Cluster, eventually
from tests.kernel.test_agent_configuration import configure

pytestmark = pytest.mark.kernel
of_userspace = pytest.mark.backends("userspace")

_ROUTES = ["ip", "route", "show", "table", "local", "proto", "235"]


def routes(cluster: Cluster) -> str:
    """The local routes of Services."""
    return cluster.node.run(_ROUTES).stdout


def relays(cluster: Cluster) -> list[int]:
    """The process IDs of the agent's relays."""
    return [each.pid for each in children(cluster.agent.process.pid) if each.name == NAME]


@pytest.mark.parametrize("other", ["nftables", "ebpf"])
def test_no_connection_is_refused_during_switches_from_and_to_another_mode(
    restartable: Cluster, load: Load, tmp_path: Path, other: str
) -> None:
    """Connections that are open at the moment of a switch may end. Each is short here, so these are few."""
    path = tmp_path / "config.conf"
    configure(path, "userspace")
    agent = restartable.start(f"--config={path}")
    web = restartable.service(node_port=True).to(restartable.a, restartable.b)
    targets = load.targets("switches", [(web.v4, 80), (web.v6, 80), (restartable.node.v4, web.node_port)])
    running = load.start_churn(restartable.p, targets, rate=100)
    try:
        for mode in (other, "userspace", other):
            configure(path, mode)
            agent.await_line(lambda line, mode=mode: f" {SWITCHED} mode={mode} " in line.text)  # type: ignore[misc]
            if mode == other:
                eventually(lambda: not routes(restartable), "the addresses are removed")
            assert set(answers(restartable.p, TCP, web.v4, 80)) == {"a", "b"}
    finally:
        report = load.end_churn(running)
    assert report["attempts"] > 50
    assert set(report["errors"]) <= {"ECONNRESET", "ENODATA"}  # ENODATA: ended without an answer
    assert report["failed"] <= max(6, report["attempts"] / 10)
    assert not routes(restartable)
    assert len(relays(restartable)) == (1 if other == "nftables" else 0), "mode nftables has one for loopback"


def test_a_connection_of_another_mode_continues_after_a_switch(restartable: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "config.conf"
    configure(path, "nftables")
    agent = restartable.start(f"--config={path}")
    web = restartable.service().to(restartable.a)
    with connected(restartable.p, TCP, web.v4, 80) as client:
        assert converse(client) == "a"
        configure(path, "userspace")
        agent.await_line(lambda line: f" {SWITCHED} mode=userspace " in line.text)
        assert outcome(restartable.p, TCP, web.v4, 80) == "a"
        assert converse(client) == "a"


def test_relays_end_with_a_killed_agent_and_cleanup_removes_the_addresses(restartable: Cluster) -> None:
    restartable.mode = "userspace"
    restartable.start()
    web = restartable.service(node_port=True).to(restartable.a)
    previous = relays(restartable)
    assert len(previous) == len(os.sched_getaffinity(0))
    assert web.v4 in routes(restartable)
    restartable.agent.kill()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in previous), "the relays end")
    assert outcome(restartable.p, TCP, web.v4, 80) == REFUSED  # the address is still local
    restartable.start()
    assert outcome(restartable.p, TCP, web.v4, 80) == "a"
    assert restartable.agent.stop() == 0
    assert "local routes" in restartable.ebpfproxy("cleanup").stdout
    assert not routes(restartable)
    assert outcome(restartable.p, TCP, web.v4, 80, 0.3) == SILENT


@of_userspace
def test_a_killed_relay_and_a_removed_address_are_restored(cluster: Cluster) -> None:
    agent = cluster.agent
    web = cluster.service().to(cluster.a)
    os.kill(relays(cluster)[0], signal.SIGKILL)
    agent.await_line(lambda line: REPLACED in line.text)
    assert set(answers(cluster.p, TCP, web.v4, 80, 20)) == {"a"}
    agent.process.send_signal(signal.SIGSTOP)  # so that it does not restore the address too early
    try:
        cluster.node.run(["ip", "route", "del", "local", f"{web.v4}/32", "dev", "lo", "table", "local"])
        assert outcome(cluster.p, UDP, web.v4, 53, 0.3) == SILENT
    finally:
        agent.process.send_signal(signal.SIGCONT)
    eventually(lambda: outcome(cluster.p, UDP, web.v4, 53) == "a", "the address is restored")


def test_while_relays_are_killed_under_load_no_connection_is_refused(
    restartable: Cluster, load: Load
) -> None:
    """Connections of the killed relay end; the others accept new ones meanwhile."""
    restartable.mode = "userspace"
    agent = restartable.start("--userspace-relays=3")
    web = restartable.service(node_port=True).to(restartable.a, restartable.b)
    targets = load.targets("killed", [(web.v4, 80), (web.v6, 80), (restartable.node.v4, web.node_port)])
    running = load.start_churn(restartable.p, targets, rate=100)
    try:
        for _ in range(3):
            since = len(agent.lines)
            os.kill(relays(restartable)[0], signal.SIGKILL)
            agent.await_line(lambda line: REPLACED in line.text, since=since)
    finally:
        report = load.end_churn(running)
    assert report["attempts"] > 20
    assert set(report["errors"]) <= {"ECONNRESET", "ENODATA"}
    assert report["failed"] <= max(6, report["attempts"] / 10)
    assert set(answers(restartable.p, TCP, web.v4, 80)) == {"a", "b"}


@pytest.mark.parametrize("first", ["process", "agent"])
def test_host_processes_listen_at_all_addresses_at_the_ports_of_services(
    restartable: Cluster, first: str
) -> None:
    """Issue 33, C1: an ingress controller at *:443 and a DNS server at *:53 did not start, or the agent did
    not serve these ports.
    """
    restartable.mode = "userspace"
    node = restartable.node
    with contextlib.ExitStack() as servers:

        def serve() -> None:
            for protocol, port in ((TCP, 80), (UDP, 53)):
                servers.callback(node.serve(protocol, port, "the host").kill)

        if first == "process":
            serve()
        restartable.start()
        web = restartable.service(node_port=True).to(restartable.a)
        if first == "agent":
            serve()
        for client in (restartable.p, node):
            for own, frontend in ((node.v4, web.v4), (node.v6, web.v6)):
                for protocol, port in ((TCP, 80), (UDP, 53)):
                    assert outcome(client, protocol, frontend, port) == "a"
                    if protocol is TCP or client is node:  # else the server replies from another address
                        assert outcome(client, protocol, own, port) == "the host"
                    assert outcome(client, protocol, own, web.node_port) == "a"
        web.to()
        assert outcome(restartable.p, TCP, web.v4, 80) == REFUSED
        assert outcome(restartable.p, UDP, web.v6, 53) == REFUSED


@of_userspace
def test_commands_show_what_the_relays_hold(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.a, cluster.b)
    flags = ("--proxy-mode=userspace", f"--manifests={cluster.folder}")
    name = f"--hostname-override={cluster.lab.node_name}"
    node = (*flags, name, "--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=pod")
    assert cluster.http_get("proxyMode") == "userspace"
    with connected(cluster.p, TCP, web.v4, 80) as client:
        assert converse(client) in ("a", "b")
        shown = cluster.ebpfproxy("dump", "objects", "-o", "json", *node)
        assert f"listener {web.v4}:80/TCP" in shown.stdout
        listed = json.loads(cluster.ebpfproxy("dump", "connections", "-o", "json", *node).stdout)
        own = [each for each in listed if each["service"].startswith(f"default/{web.name}:")]
        assert [(each["protocol"], each["frontend"]) for each in own] == [("TCP", f"{web.v4}:80")]
    explained = cluster.ebpfproxy("explain", f"{web.v4}:80", "--from=pod", *node, check=False)
    assert "relay" in explained.stdout, explained.stderr
    assert cluster.metric("ebpfproxy_datapath_events_total") > 0


@of_userspace
def test_verify_compares_the_relays_and_the_addresses_with_the_cluster(cluster: Cluster) -> None:
    agent = cluster.agent
    web = cluster.service(node_port=True).to(cluster.a)
    flags = (
        "--proxy-mode=userspace",
        f"--manifests={cluster.folder}",
        f"--hostname-override={cluster.lab.node_name}",
        "--detect-local-mode=InterfaceNamePrefix",
        "--pod-interface-name-prefix=veth",
    )
    same = cluster.ebpfproxy("verify", *flags, check=False)
    assert same.returncode == 0, same.stdout + same.stderr
    agent.process.send_signal(signal.SIGSTOP)  # so that it does not restore the address
    try:
        cluster.node.run(["ip", "route", "del", "local", f"{web.v4}/32", "dev", "lo", "table", "local"])
        differs = cluster.ebpfproxy("verify", *flags, check=False)
    finally:
        agent.process.send_signal(signal.SIGCONT)
    assert differs.returncode == 1, differs.stdout + differs.stderr
    assert f"address {web.v4}" in differs.stdout
