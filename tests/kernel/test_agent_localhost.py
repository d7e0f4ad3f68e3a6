"""NodePorts on 127.0.0.1 and ::1 in mode nftables: the agent's relay, and what is rejected."""

import os
import signal
from pathlib import Path

import pytest

from ebpfproxy.agent.mode_switch import SWITCHED
from ebpfproxy.agent.reconciler import NOT_SERVED
from ebpfproxy.backends.nftables.localhost_node_ports import REJECTING_CHAINS
from ebpfproxy.backends.userspace.messages import NAME
from ebpfproxy.backends.userspace.relays import REPLACED
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.processes import children
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, answers, connected, converse, outcome
from tests.kernel.cluster import Cluster, elsewhere, eventually
from tests.kernel.test_agent_configuration import configure

pytestmark = pytest.mark.kernel

LOOPBACK = ("127.0.0.1", "::1")
METRICS = "kubeproxy_nftables_localhost_nodeport"
AT_ONCE = "--iptables-min-sync-period=0s"


def relays(cluster: Cluster) -> list[int]:
    """The process IDs of the agent's relays."""
    return [each.pid for each in children(cluster.agent.process.pid) if each.name == NAME]


def at_loopback(cluster: Cluster, port: int) -> list[str]:
    """The outcomes of a TCP client on the node."""
    return [outcome(cluster.node, TCP, address, port) for address in LOOPBACK]


@pytest.fixture
def nftables(restartable: Cluster) -> Cluster:
    restartable.mode = "nftables"
    return restartable


def test_one_relay_runs_while_there_is_a_tcp_node_port_with_endpoints(nftables: Cluster) -> None:
    nftables.start(AT_ONCE, "-v=4")
    internal = nftables.service().to(nftables.a)
    assert outcome(nftables.node, TCP, internal.v4, 80) == "a"
    assert relays(nftables) == []
    web = nftables.service(node_port=True).to(nftables.a, nftables.b, sessionAffinity="ClientIP")
    (relay,) = relays(nftables)
    assert nftables.metric(f"{METRICS}_listeners") == 2
    for address in LOOPBACK:
        assert len(answers(nftables.node, TCP, address, web.node_port, 10)) == 1
    with connected(nftables.node, TCP, "127.0.0.1", web.node_port) as client:
        before = converse(client)
        web.to(elsewhere(nftables.b), type="NodePort", externalTrafficPolicy="Local", sessionAffinity="None")
        assert at_loopback(nftables, web.node_port) == ["b", "b"]
        assert converse(client) == before
    assert relays(nftables) == [relay]
    assert outcome(nftables.node, TCP, "127.0.0.2", web.node_port) == REFUSED
    assert nftables.node.call(lambda: sysctl.read("net/ipv4/conf/all/route_localnet")) == "0"
    web.to()
    assert at_loopback(nftables, web.node_port) == [REFUSED, REFUSED]
    assert relays(nftables) == []
    assert nftables.metric(f"{METRICS}_listeners") == 0
    assert not Path(f"/proc/{relay}").exists()


def test_packets_of_udp_are_rejected_and_counted(nftables: Cluster) -> None:
    nftables.start(AT_ONCE)
    web = nftables.service(node_port=True).to(nftables.a)
    assert nftables.metric(f"{METRICS}_rejected_packets_total") == 0
    for address in LOOPBACK:
        assert outcome(nftables.node, UDP, address, web.node_port) == REFUSED
    assert outcome(nftables.node, UDP, nftables.node.v4, web.node_port) == "a"
    for family in ("IPv4", "IPv6"):
        assert nftables.shows(f'{METRICS}_rejected_packets_total{{ip_family="{family}",protocol="UDP"}} 1.0')
        assert nftables.shows(f'{METRICS}_rejected_packets_total{{ip_family="{family}",protocol="SCTP"}} 0.0')
    listed = nftables.node.run(["nft", "list", "chain", "ip", "kube-proxy", REJECTING_CHAINS[UDP]]).stdout
    assert "counter packets 1 " in listed
    nftables.end()
    nftables.start(AT_ONCE)
    assert nftables.metric(f"{METRICS}_rejected_packets_total") == 2


def test_a_program_that_has_the_port_is_named_and_the_relay_listens_once_it_has_ended(
    nftables: Cluster,
) -> None:
    agent = nftables.start(AT_ONCE)
    web = nftables.service(node_port=True)
    host = nftables.node.serve(TCP, web.node_port, reply="the host", address="127.0.0.1")
    try:
        web.to(nftables.a)
        assert at_loopback(nftables, web.node_port) == ["the host", "a"]
        assert outcome(nftables.node, TCP, nftables.node.v4, web.node_port) == "a"
        (line,) = [line.text for line in agent.lines if NOT_SERVED in line.text]
        assert f"127.0.0.1:{web.node_port}" in line
        assert "hint=" in line
        assert nftables.metric(f"{METRICS}_listeners") == 1
        assert nftables.metric(f"{METRICS}_listener_creation_failures_total") >= 1
        other = nftables.service(node_port=True).to(nftables.b)
        assert at_loopback(nftables, other.node_port) == ["b", "b"]
    finally:
        host.kill()
    eventually(lambda: at_loopback(nftables, web.node_port) == ["a", "a"], "the relay listens")
    assert nftables.metric(f"{METRICS}_listeners") == 4


def test_a_killed_relay_is_replaced_and_a_relay_ends_with_its_agent(nftables: Cluster) -> None:
    agent = nftables.start(AT_ONCE)
    web = nftables.service(node_port=True).to(nftables.a)
    (first,) = relays(nftables)
    os.kill(first, signal.SIGKILL)
    agent.await_line(lambda line: REPLACED in line.text)
    eventually(lambda: at_loopback(nftables, web.node_port) == ["a", "a"], "another relay listens")
    (second,) = relays(nftables)
    assert second != first
    nftables.end()
    eventually(lambda: not Path(f"/proc/{second}").exists(), "the relay ends")
    assert at_loopback(nftables, web.node_port) == [REFUSED, REFUSED]
    assert outcome(nftables.node, TCP, nftables.node.v4, web.node_port) == "a"
    nftables.start(AT_ONCE)
    assert at_loopback(nftables, web.node_port) == ["a", "a"]


@pytest.mark.parametrize("other", ["ebpf", "userspace"])
def test_loopback_is_served_after_a_switch_to_and_from_this_mode(
    restartable: Cluster, tmp_path: Path, other: str
) -> None:
    """Mode ebpf keeps host processes from binding NodePorts."""
    path = tmp_path / "config.conf"
    configure(path, other)
    agent = restartable.start(f"--config={path}")
    web = restartable.service(node_port=True).to(restartable.a)
    for mode, count in (("nftables", 1), (other, 0)):
        configure(path, mode)
        agent.await_line(lambda line, mode=mode: f" {SWITCHED} mode={mode} " in line.text)  # type: ignore[misc]
        assert at_loopback(restartable, web.node_port) == ["a", "a"]
        if mode != "userspace":
            assert len(relays(restartable)) == count


@pytest.mark.parametrize("flag", ["--nodeport-addresses=primary", "--iptables-localhost-nodeports=false"])
def test_without_node_ports_on_loopback_there_is_no_relay_and_no_rule(nftables: Cluster, flag: str) -> None:
    nftables.start(AT_ONCE, flag)
    web = nftables.service(node_port=True).to(nftables.a)
    assert at_loopback(nftables, web.node_port) == [REFUSED, REFUSED]
    assert outcome(nftables.node, TCP, nftables.node.v4, web.node_port) == "a"
    assert relays(nftables) == []
    assert METRICS not in nftables.http_get("metrics")
    table = nftables.node.run(["nft", "list", "table", "ip", "kube-proxy"]).stdout
    assert not [chain for chain in REJECTING_CHAINS.values() if chain in table]


def test_a_neighbor_does_not_reach_the_relay_although_its_packets_reach_loopback(nftables: Cluster) -> None:
    """Mode iptables may have left route_localnet (CVE-2020-8558)."""
    nftables.start(AT_ONCE)
    web = nftables.service(node_port=True).to(nftables.a)
    node, neighbor = nftables.node, nftables.q
    host = node.serve(TCP, 29_999, reply="the host", address="127.0.0.1")
    name = "net/ipv4/conf/all/route_localnet"
    try:
        for each in (node, neighbor):
            each.call(lambda: sysctl.ensure(name, "1"))
        gateway = nftables.lab.addresses.gateway(0)[0]
        nftables.lab.ip(neighbor, "addr del 127.0.0.1/8 dev lo", f"route add 127.0.0.1/32 via {gateway}")
        assert outcome(neighbor, TCP, "127.0.0.1", 29_999) == "the host"
        assert outcome(neighbor, TCP, "127.0.0.1", web.node_port, 0.5) == SILENT
        assert at_loopback(nftables, web.node_port) == ["a", "a"]
    finally:
        host.kill()
        node.call(lambda: sysctl.ensure(name, "0"))


def test_commands_show_the_relay(nftables: Cluster) -> None:
    nftables.start(AT_ONCE)
    web = nftables.service(node_port=True).to(nftables.a)
    flags = (
        "--proxy-mode=nftables",
        f"--manifests={nftables.folder}",
        f"--hostname-override={nftables.lab.node_name}",
        "--detect-local-mode=InterfaceNamePrefix",
        "--pod-interface-name-prefix=veth",
    )
    frontend = f"127.0.0.1:{web.node_port}"
    assert f"listener {frontend}/TCP" in nftables.ebpfproxy("dump", "objects", "-o", "json", *flags).stdout
    explained = nftables.ebpfproxy("explain", frontend, "--from=node", *flags, check=False).stdout
    assert "relay process" in explained
    assert "[LoopbackNotRelayed]" in explained
    assert "differs" not in explained
    with connected(nftables.node, TCP, "127.0.0.1", web.node_port) as client:
        assert converse(client) == "a"
        assert frontend in nftables.ebpfproxy("dump", "connections", *flags).stdout
    verify = ("verify", *flags, f"--canary=default/{web.name}:tcp")
    same = nftables.ebpfproxy(*verify, check=False)
    assert same.returncode == 0, same.stdout + same.stderr
    nftables.end()
    differs = nftables.ebpfproxy("verify", *flags, check=False)
    assert differs.returncode == 1, differs.stdout + differs.stderr
    assert f"listener {frontend}/TCP" in differs.stdout
