"""NodePorts, with pods and the node as clients: on which addresses they answer, and on which not."""

import pytest

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import (
    REFUSED,
    SILENT,
    TCP,
    UDP,
    answers,
    ask_from,
    connected,
    converse,
    family_of,
    outcome,
    socket_in,
)
from tests.kernel.cluster import Cluster, eventually, local_address
from tests.kernel.differences import DIFFERENCES

pytestmark = pytest.mark.kernel

both_clients = pytest.mark.parametrize("client", ["pod", "node"])
both_protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])


@both_clients
@both_protocols
def test_a_node_port_answers_on_the_nodes_addresses(
    cluster: Cluster, client: str, protocol: Protocol
) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    gateways = ["10.244.1.1", "fd00:10:244:1::1"]
    for address in (cluster.node.v4, cluster.node.v6, *gateways):
        assert outcome(cluster.client(client), protocol, address, web.node_port) == "a", address


@both_protocols
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"])
def test_a_node_port_answers_the_node_on_its_loopback(
    cluster: Cluster, address: str, protocol: Protocol
) -> None:
    """Regression: 127.0.0.1:nodePort from the host; without route_localnet, and for IPv6 too."""
    web = cluster.service(node_port=True).to(cluster.a)
    family = family_of(address.removeprefix("::ffff:"))
    differences = DIFFERENCES[cluster.mode]
    has_listener = not (differences.by_relay and address == "127.0.0.2")
    is_reached = has_listener and family in differences.loopback_families
    expected = "a" if is_reached else REFUSED
    assert outcome(cluster.node, protocol, address, web.node_port) == expected


@pytest.mark.backends("ebpf")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_client_on_the_node_sees_the_loopback_address_as_its_peer(cluster: Cluster, address: str) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    with connected(cluster.node, TCP, address, web.node_port) as sock:
        assert converse(sock) == "a"
        assert sock.getpeername()[:2] == (address, web.node_port)
    with socket_in(cluster.node, UDP, family_of(address)) as sock:
        assert ask_from(sock, address, web.node_port) == ("a", (address, web.node_port))


@both_protocols
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_pods_loopback_addresses_reach_the_pod_itself(
    cluster: Cluster, address: str, protocol: Protocol
) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    own = cluster.p.serve(protocol, web.node_port, reply="p's own")
    try:
        assert outcome(cluster.p, protocol, address, web.node_port) == "p's own"
    finally:
        own.kill()


@both_protocols
def test_a_node_port_does_not_answer_on_a_pods_own_address(cluster: Cluster, protocol: Protocol) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    assert outcome(cluster.p, protocol, cluster.p.v4, web.node_port) == "refused"
    assert outcome(cluster.p, protocol, "0.0.0.0", web.node_port) == "refused"


@pytest.mark.parametrize("address", ["192.0.2.7/32", "2001:db8::7/128"])
def test_a_node_port_answers_on_an_added_address_until_it_is_removed(cluster: Cluster, address: str) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    dialed = address.partition("/")[0]
    assert outcome(cluster.p, TCP, dialed, web.node_port, 0.2) != "a"
    with local_address(cluster, address):
        eventually(lambda: outcome(cluster.p, TCP, dialed, web.node_port, 0.2) == "a", "the new address")
        assert outcome(cluster.node, TCP, dialed, web.node_port) == "a"
    eventually(lambda: outcome(cluster.p, TCP, dialed, web.node_port, 0.2) != "a", "the address is gone")


@both_clients
def test_a_node_port_on_another_hosts_address_is_not_translated(cluster: Cluster, client: str) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    assert outcome(cluster.client(client), TCP, cluster.lab.outside.v4, web.node_port) in ("refused", SILENT)


def test_other_ports_of_the_node_reach_the_node(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    host = cluster.node.serve(Protocol.TCP, web.node_port + 1000, reply="the node")
    try:
        for client in (cluster.p, cluster.node):
            assert outcome(client, TCP, cluster.node.v4, web.node_port + 1000) == "the node"
            assert outcome(client, TCP, cluster.node.v4, web.node_port) == "a"
        assert outcome(cluster.node, TCP, "127.0.0.1", web.node_port + 1000) == "the node"
    finally:
        host.kill()


@both_protocols
def test_a_node_port_uses_all_endpoints(cluster: Cluster, protocol: Protocol) -> None:
    web = cluster.service(node_port=True).to(cluster.a, cluster.b, cluster.c)
    assert set(answers(cluster.p, protocol, cluster.node.v4, web.node_port, 60)) == {"a", "b", "c"}


def test_only_the_new_node_port_answers_after_a_change(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    previous, web.node_port = web.node_port, web.node_port + 1500
    web.set()
    assert outcome(cluster.p, TCP, cluster.node.v4, web.node_port) == "a"
    assert outcome(cluster.p, TCP, cluster.node.v4, previous) == "refused"
