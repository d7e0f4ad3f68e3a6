"""A tenant who writes Services and pods must not disturb other pods, the node or other nodes."""

import pytest

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import REFUSED, TCP, UDP, outcome
from tests.kernel.cluster import Cluster, Exposed

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])

PORTS = {TCP: 80, UDP: 53}
LOOPBACK = {"v4": "127.0.0.1", "v6": "::1"}


def at_loopback(cluster: Cluster) -> Exposed:
    """A Service whose load balancer is 127.0.0.1 and ::1, as minikube tunnel and Docker Desktop set it."""
    web = cluster.service(type="LoadBalancer")
    web.status = {"loadBalancer": {"ingress": [{"ip": address} for address in LOOPBACK.values()]}}
    return web.to(cluster.a)


@both_families
@both_protocols
def test_a_load_balancer_address_of_loopback_is_not_that_of_pods(
    cluster: Cluster, family: str, protocol: Protocol
) -> None:
    at_loopback(cluster)
    assert outcome(cluster.p, protocol, LOOPBACK[family], PORTS[protocol]) == REFUSED


@pytest.mark.backends("ebpf")
@both_families
@both_protocols
def test_a_load_balancer_address_of_loopback_serves_the_node(
    cluster: Cluster, family: str, protocol: Protocol
) -> None:
    at_loopback(cluster)
    assert outcome(cluster.node, protocol, LOOPBACK[family], PORTS[protocol]).split()[0] == "a"
