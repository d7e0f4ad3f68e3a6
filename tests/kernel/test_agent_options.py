"""kube-proxy flags that determine at which addresses NodePorts answer."""

import errno

import pytest

from ebpfproxy.lab import manifests
from tests.kernel.clients import REFUSED, TCP, answers, outcome
from tests.kernel.cluster import Cluster, eventually
from tests.kernel.test_socket_binds import bind_errno

pytestmark = pytest.mark.kernel


def gateway(restartable: Cluster) -> str:
    """The node's address that is the pods' gateway."""
    return f"10.244.{restartable.lab.number}.1"


def test_without_localhost_nodeports_loopback_rejects_node_ports(restartable: Cluster) -> None:
    restartable.start("--iptables-localhost-nodeports=false")
    web = restartable.service(node_port=True).to(restartable.a)
    for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "::ffff:0.0.0.0"):
        assert outcome(restartable.node, TCP, address, web.node_port) == REFUSED, address
    assert outcome(restartable.node, TCP, restartable.node.v4, web.node_port) == "a"
    assert outcome(restartable.p, TCP, restartable.node.v6, web.node_port) == "a"


def test_node_ports_answer_only_in_the_networks_of_nodeport_addresses(restartable: Cluster) -> None:
    restartable.start(f"--nodeport-addresses={restartable.node.v4}/24")
    web = restartable.service(node_port=True).to(restartable.a)
    host = restartable.node.serve(TCP, web.node_port, reply="the node", address=gateway(restartable))
    try:
        for client in (restartable.p, restartable.node):
            assert outcome(client, TCP, restartable.node.v4, web.node_port) == "a"
            assert outcome(client, TCP, gateway(restartable), web.node_port) == "the node"
        for address in ("127.0.0.1", "0.0.0.0"):
            assert outcome(restartable.node, TCP, address, web.node_port) == REFUSED, address
    finally:
        host.kill()


def test_the_unspecified_address_behaves_as_the_loopback_of_its_family(restartable: Cluster) -> None:
    restartable.start("--nodeport-addresses=127.0.0.0/8,2001:db8::/64")
    web = restartable.service(node_port=True).to(restartable.a)
    for address in ("127.0.0.1", "0.0.0.0", "::ffff:0.0.0.0"):
        assert outcome(restartable.node, TCP, address, web.node_port) == "a", address
    for address in ("::1", "::"):
        assert outcome(restartable.node, TCP, address, web.node_port) == REFUSED, address


def test_a_node_port_can_be_bound_on_addresses_outside_nodeport_addresses(restartable: Cluster) -> None:
    restartable.start(f"--nodeport-addresses={restartable.node.v4}/32")
    web = restartable.service(node_port=True).to(restartable.a)
    assert bind_errno(restartable.node, TCP, gateway(restartable), web.node_port) == 0
    assert bind_errno(restartable.node, TCP, "127.0.0.1", web.node_port) == 0
    assert bind_errno(restartable.node, TCP, restartable.node.v4, web.node_port) == errno.EADDRINUSE


def test_with_primary_node_ports_answer_at_the_node_objects_addresses(restartable: Cluster) -> None:
    restartable.start("--nodeport-addresses=primary")
    web = restartable.service(node_port=True).to(restartable.a, restartable.b)
    for address in (restartable.node.v4, restartable.node.v6):
        assert set(answers(restartable.p, TCP, address, web.node_port)) == {"a", "b"}
    for address in (gateway(restartable), f"fd00:10:244:{restartable.lab.number}::1"):
        assert outcome(restartable.p, TCP, address, web.node_port) == REFUSED


def test_with_primary_node_ports_follow_a_change_of_the_node_object(restartable: Cluster) -> None:
    """With `primary`, NodePorts answer at the addresses of the Node object."""
    restartable.start("--nodeport-addresses=primary")
    web = restartable.service(node_port=True).to(restartable.a)
    moved = manifests.node(restartable.lab.node_name, [gateway(restartable)])
    manifests.write(restartable.folder / "node.yaml", moved)
    eventually(
        lambda: outcome(restartable.p, TCP, gateway(restartable), web.node_port, 2.0) == "a",
        "the new address",
    )
    assert outcome(restartable.p, TCP, restartable.node.v4, web.node_port) == REFUSED
