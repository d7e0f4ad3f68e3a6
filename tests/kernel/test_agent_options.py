"""kube-proxy flags that determine at which addresses NodePorts answer."""

import errno

import pytest

from ebpfproxy.lab import manifests
from tests.kernel.clients import REFUSED, TCP, answers, outcome
from tests.kernel.cluster import Cluster, eventually
from tests.kernel.test_socket_binds import bind_errno

pytestmark = pytest.mark.kernel


def gateway(rough: Cluster) -> str:
    """The node's address that is the pods' gateway."""
    return f"10.244.{rough.lab.number}.1"


def test_without_localhost_nodeports_loopback_rejects_node_ports(rough: Cluster) -> None:
    rough.start("--iptables-localhost-nodeports=false")
    web = rough.service(node_port=True).to(rough.a)
    for address in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "::ffff:0.0.0.0"):
        assert outcome(rough.node, TCP, address, web.node_port) == REFUSED, address
    assert outcome(rough.node, TCP, rough.node.v4, web.node_port) == "a"
    assert outcome(rough.p, TCP, rough.node.v6, web.node_port) == "a"


def test_node_ports_answer_only_in_the_networks_of_nodeport_addresses(rough: Cluster) -> None:
    rough.start(f"--nodeport-addresses={rough.node.v4}/24")
    web = rough.service(node_port=True).to(rough.a)
    host = rough.node.serve(TCP, web.node_port, reply="the node", address=gateway(rough))
    try:
        for client in (rough.p, rough.node):
            assert outcome(client, TCP, rough.node.v4, web.node_port) == "a"
            assert outcome(client, TCP, gateway(rough), web.node_port) == "the node"
        for address in ("127.0.0.1", "0.0.0.0"):
            assert outcome(rough.node, TCP, address, web.node_port) == REFUSED, address
    finally:
        host.kill()


def test_the_unspecified_address_behaves_as_the_loopback_of_its_family(rough: Cluster) -> None:
    rough.start("--nodeport-addresses=127.0.0.0/8,2001:db8::/64")
    web = rough.service(node_port=True).to(rough.a)
    for address in ("127.0.0.1", "0.0.0.0", "::ffff:0.0.0.0"):
        assert outcome(rough.node, TCP, address, web.node_port) == "a", address
    for address in ("::1", "::"):
        assert outcome(rough.node, TCP, address, web.node_port) == REFUSED, address


def test_a_node_port_can_be_bound_on_addresses_outside_nodeport_addresses(rough: Cluster) -> None:
    rough.start(f"--nodeport-addresses={rough.node.v4}/32")
    web = rough.service(node_port=True).to(rough.a)
    assert bind_errno(rough.node, TCP, gateway(rough), web.node_port) == 0
    assert bind_errno(rough.node, TCP, "127.0.0.1", web.node_port) == 0
    assert bind_errno(rough.node, TCP, rough.node.v4, web.node_port) == errno.EADDRINUSE


def test_with_primary_node_ports_answer_at_the_node_objects_addresses(rough: Cluster) -> None:
    rough.start("--nodeport-addresses=primary")
    web = rough.service(node_port=True).to(rough.a, rough.b)
    for address in (rough.node.v4, rough.node.v6):
        assert set(answers(rough.p, TCP, address, web.node_port)) == {"a", "b"}
    for address in (gateway(rough), f"fd00:10:244:{rough.lab.number}::1"):
        assert outcome(rough.p, TCP, address, web.node_port) == REFUSED


def test_with_primary_node_ports_follow_a_change_of_the_node_object(rough: Cluster) -> None:
    """With `primary`, NodePorts answer at the addresses of the Node object."""
    rough.start("--nodeport-addresses=primary")
    web = rough.service(node_port=True).to(rough.a)
    moved = manifests.node(rough.lab.node_name, [gateway(rough)])
    manifests.write(rough.folder / "node.yaml", moved)
    eventually(lambda: outcome(rough.p, TCP, gateway(rough), web.node_port, 2.0) == "a", "the new address")
    assert outcome(rough.p, TCP, rough.node.v4, web.node_port) == REFUSED
