"""External IPs and load balancers' addresses, as pods and the node dial them."""

import pytest

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import SILENT, TCP, UDP, connected, converse, outcome
from tests.kernel.cluster import Cluster, Exposed

pytestmark = pytest.mark.kernel

both_clients = pytest.mark.parametrize("client", ["pod", "node"])
both_protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
PORTS = {TCP: 80, UDP: 53}


def external(web: Exposed) -> tuple[str, str]:
    """Two addresses that no other Service of these tests has, one of each family; both lead nowhere."""
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
def test_an_external_ip_leads_to_the_endpoints(cluster: Cluster, client: str, protocol: Protocol) -> None:
    web = cluster.service()
    web.to(cluster.a, externalIPs=list(external(web)))
    for address in external(web):
        assert outcome(cluster.client(client), protocol, address, PORTS[protocol]) == "a"


@both_clients
@both_protocols
def test_a_load_balancers_address_leads_to_the_endpoints_at_once(
    cluster: Cluster, client: str, protocol: Protocol
) -> None:
    _, vips = balanced(cluster)
    for vip in vips:
        assert outcome(cluster.client(client), protocol, vip, PORTS[protocol]) == "a"


@both_clients
def test_an_address_of_mode_proxy_is_left_to_the_load_balancer(cluster: Cluster, client: str) -> None:
    """KEP-1860: it terminates TLS or speaks the PROXY protocol, so nobody may go around it."""
    web, vips = balanced(cluster, ip_mode="Proxy")
    place = cluster.client(client)
    assert {outcome(place, TCP, vip, 80, 0.3) for vip in vips} == {SILENT}
    assert outcome(place, TCP, web.v4, 80) == "a"


@pytest.mark.backends("ebpf")
def test_source_ranges_are_decided_by_the_packet_not_by_the_socket(cluster: Cluster) -> None:
    """A connecting socket has no address yet. So the pod's connection is not translated, nor refused;
    its packets are somebody else's to judge."""
    web, vips = balanced(cluster, loadBalancerSourceRanges=["192.0.2.0/24"])
    assert outcome(cluster.p, TCP, vips[0], 80, 0.3) == SILENT
    assert outcome(cluster.p, TCP, web.v4, 80) == "a"
    assert outcome(cluster.p, TCP, cluster.node.v4, web.node_port) == "a"


@pytest.mark.backends("ebpf")
def test_the_node_reaches_a_restricted_address_where_the_ranges_hold_its_own(cluster: Cluster) -> None:
    _, vips = balanced(cluster, loadBalancerSourceRanges=[f"{cluster.node.v4}/32"])
    assert outcome(cluster.node, TCP, vips[0], 80) == "a"
    assert outcome(cluster.p, TCP, vips[0], 80, 0.3) == SILENT


def test_the_nodes_address_as_an_external_ip_takes_one_port_only(cluster: Cluster) -> None:
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


def test_an_external_ip_that_is_taken_away_leads_nowhere(cluster: Cluster) -> None:
    web = cluster.service()
    web.to(cluster.a, externalIPs=list(external(web)))
    web.set(externalIPs=[])
    assert outcome(cluster.p, TCP, external(web)[0], 80, 0.3) == SILENT
    with connected(cluster.p, TCP, web.v4, 80) as sock:
        assert converse(sock) == "a"
