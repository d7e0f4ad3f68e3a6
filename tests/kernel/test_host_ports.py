"""hostPort of pods, which the agent serves with --host-ports."""

import pytest

from ebpfproxy.agent.foreign_host_ips import NOT_SERVED
from ebpfproxy.lab import manifests
from tests.kernel.clients import REFUSED, TCP, UDP, outcome
from tests.kernel.cluster import TCP_TARGET, UDP_TARGET, Cluster, eventually, local_address
from tests.kernel.conftest import MODES
from tests.kernel.ipvs_here import skip_without_ipvs

pytestmark = pytest.mark.kernel

PORT = 8443


def write_pod(cluster: Cluster, pod: str, **port: object) -> None:
    of = {"a": cluster.a, "b": cluster.b}[pod]
    ports = [
        {"containerPort": TCP_TARGET, "hostPort": PORT, "protocol": "TCP", **port},
        {"containerPort": UDP_TARGET, "hostPort": PORT, "protocol": "UDP", **port},
    ]
    made = manifests.pod("web-0", cluster.lab.node_name, [of.v4, of.v6], ports)
    cluster.write("pod", made)


@pytest.mark.parametrize("mode", MODES)
def test_a_host_port_is_served_at_the_addresses_of_the_node(restartable: Cluster, mode: str) -> None:
    skip_without_ipvs(mode)
    restartable.mode, flags = MODES[mode]
    restartable.start("--host-ports", *flags)
    write_pod(restartable, "a")
    for client in restartable.lab.outside, restartable.p, restartable.node:
        for address in restartable.node.v4, restartable.node.v6:
            for protocol in TCP, UDP:
                assert outcome(client, protocol, address, PORT) == "a", (client.name, address, protocol)
    write_pod(restartable, "b")
    assert outcome(restartable.lab.outside, TCP, restartable.node.v4, PORT) == "b"
    restartable.write("pod")
    assert outcome(restartable.lab.outside, TCP, restartable.node.v4, PORT) == REFUSED


def test_a_host_port_with_a_host_ip_is_served_there_only(restartable: Cluster) -> None:
    restartable.start("--host-ports")
    write_pod(restartable, "a", hostIP=restartable.node.v4)
    assert outcome(restartable.lab.outside, TCP, restartable.node.v4, PORT) == "a"
    assert outcome(restartable.lab.outside, TCP, restartable.node.v6, PORT) == REFUSED


def test_a_host_ip_of_another_machine_is_served_from_when_the_node_has_it(restartable: Cluster) -> None:
    agent, address = restartable.start("--host-ports"), restartable.lab.outside.v4
    write_pod(restartable, "a", hostIP=address)
    agent.await_line(lambda line: NOT_SERVED in line.text and line.values["host_ip"] == address)
    for client in restartable.node, restartable.p:
        assert outcome(client, TCP, address, PORT) == REFUSED
    with local_address(restartable, address):
        eventually(lambda: outcome(restartable.node, TCP, address, PORT) == "a", "the node has the address")
    eventually(lambda: outcome(restartable.p, TCP, address, PORT) == REFUSED, "it has it no longer")


def test_a_host_ip_of_loopback_serves_the_node_only(restartable: Cluster) -> None:
    restartable.start("--host-ports")
    write_pod(restartable, "a", hostIP="127.0.0.1")
    assert outcome(restartable.p, TCP, "127.0.0.1", PORT) == REFUSED
    assert outcome(restartable.node, TCP, "127.0.0.1", PORT) == "a"


def test_a_host_port_survives_a_restart_and_needs_the_flag(restartable: Cluster) -> None:
    restartable.start("--host-ports")
    write_pod(restartable, "a")
    restartable.start("--host-ports")
    assert outcome(restartable.lab.outside, TCP, restartable.node.v4, PORT) == "a"
    restartable.start()
    eventually(lambda: outcome(restartable.lab.outside, TCP, restartable.node.v4, PORT) == REFUSED, "the end")
