"""External IPs and load balancer addresses, with pods and the node as clients."""

import pytest

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import SILENT, TCP, UDP, connected, converse, outcome
from tests.kernel.cluster import Cluster, Exposed

pytestmark = pytest.mark.kernel

both_clients = pytest.mark.parametrize("client", ["pod", "node"])
both_protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
PORTS = {TCP: 80, UDP: 53}


def external(web: Exposed) -> tuple[str, str]:
    """Two addresses that no other Service of these tests has, one of each family. No host has them."""
    number = int(web.name.removeprefix("svc-"))
    return f"10.98.{number >> 8}.{number & 255}", f"fd00:10:96:1::{number:x}"


def balanced(cluster: Cluster, ip_mode: str = "", **spec: object) -> tuple[Exposed, tuple[str, str]]:
    web = cluster.service(node_port=True, type="LoadBalancer", **spec)
    vips = external(web)
    mode = {"ipMode": ip_mode} if ip_mode else {}
    web.status = {"loadBalancer": {"ingress": [{"ip": vip} | mode for vip in vips]}}
    return web.to(cluster.a), vips


@both_clients
@both_protocols
def test_an_external_ip_reaches_the_endpoints(cluster: Cluster, client: str, protocol: Protocol) -> None:
    web = cluster.service()
    web.to(cluster.a, externalIPs=list(external(web)))
    for address in external(web):
        assert outcome(cluster.client(client), protocol, address, PORTS[protocol]) == "a"


@both_clients
@both_protocols
def test_a_load_balancer_address_reaches_the_endpoints(
    cluster: Cluster, client: str, protocol: Protocol
) -> None:
    _, vips = balanced(cluster)
    for vip in vips:
        assert outcome(cluster.client(client), protocol, vip, PORTS[protocol]) == "a"


@both_clients
def test_a_load_balancer_address_with_ip_mode_proxy_is_not_translated(cluster: Cluster, client: str) -> None:
    """KEP-1860: the load balancer terminates TLS or adds the PROXY protocol, so no client may bypass it."""
    web, vips = balanced(cluster, ip_mode="Proxy")
    netns = cluster.client(client)
    assert {outcome(netns, TCP, vip, 80, 0.3) for vip in vips} == {SILENT}
    assert outcome(netns, TCP, web.v4, 80) == "a"


@pytest.mark.backends("ebpf")
def test_source_ranges_are_checked_on_packets_and_not_in_connect(cluster: Cluster) -> None:
    """A connecting socket has no source address yet. The hook neither translates nor rejects the connection:
    the packet path decides about its packets."""
    web, vips = balanced(cluster, loadBalancerSourceRanges=["192.0.2.0/24"])
    assert outcome(cluster.p, TCP, vips[0], 80, 0.3) == SILENT
    assert outcome(cluster.p, TCP, web.v4, 80) == "a"
    assert outcome(cluster.p, TCP, cluster.node.v4, web.node_port) == "a"


@pytest.mark.backends("ebpf")
def test_the_node_reaches_a_restricted_address_if_the_ranges_contain_its_address(cluster: Cluster) -> None:
    _, vips = balanced(cluster, loadBalancerSourceRanges=[f"{cluster.node.v4}/32"])
    assert outcome(cluster.node, TCP, vips[0], 80) == "a"
    assert outcome(cluster.p, TCP, vips[0], 80, 0.3) == SILENT


def test_a_node_address_as_external_ip_takes_only_the_services_port(cluster: Cluster) -> None:
    """Regression: cilium #44430, where the node became unreachable on all its other ports."""
    web = cluster.service()
    host = cluster.node.serve(Protocol.TCP, 7022, reply="the node")
    web.to(cluster.a, externalIPs=[cluster.node.v4, cluster.node.v6])
    try:
        for client in (cluster.p, cluster.node):
            for address in (cluster.node.v4, cluster.node.v6):
                assert outcome(client, TCP, address, 80) == "a"
                assert outcome(client, TCP, address, 7022) == "the node"
                assert outcome(client, TCP, address, 7023) == "refused"
        assert outcome(cluster.lab.outside, TCP, cluster.node.v4, 7022) == "the node"
        assert outcome(cluster.node, TCP, "127.0.0.1", 80) == "refused"
    finally:
        host.kill()
        cluster.write(web.name)


def test_a_removed_external_ip_does_not_answer(cluster: Cluster) -> None:
    web = cluster.service()
    web.to(cluster.a, externalIPs=list(external(web)))
    web.set(externalIPs=[])
    assert outcome(cluster.p, TCP, external(web)[0], 80, 0.3) == SILENT
    with connected(cluster.p, TCP, web.v4, 80) as sock:
        assert converse(sock) == "a"
