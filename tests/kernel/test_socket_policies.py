"""The endpoints that a client gets: policies, topology, terminating endpoints, no endpoints."""

import pytest

from ebpfproxy.lab import Pod
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import (
    REFUSED,
    SILENT,
    TCP,
    UDP,
    answers,
    family_of,
    outcome,
    rejection,
    socket_in,
)
from tests.kernel.cluster import ZONE, Cluster, Exposed, PodEndpoint, elsewhere, terminating
from tests.kernel.differences import DIFFERENCES

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_clients = pytest.mark.parametrize("client", ["pod", "node"])
PORTS = {TCP: 80, UDP: 53}


def reached(cluster: Cluster, client: str, web: Exposed, count: int = 40) -> str:
    """The names of all pods that answer on the ClusterIP, TCP and UDP, sorted."""
    netns = cluster.client(client)
    return "".join(sorted(answers(netns, TCP, web.v4, 80, count) | answers(netns, UDP, web.v6, 53, count)))


@both_families
@both_clients
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
def test_without_endpoints_a_connection_is_rejected_at_once(
    cluster: Cluster, client: str, family: str, protocol: Protocol
) -> None:
    differences = DIFFERENCES[cluster.mode]
    web = cluster.service().to()
    answer, sent_again = rejection(cluster.client(client), protocol, web.address(family), PORTS[protocol])
    assert answer == differences.to(client, protocol, REFUSED)
    assert sent_again <= differences.most_retransmissions()


@pytest.mark.backends("ebpf")
@both_families
@both_clients
def test_without_endpoints_sending_a_datagram_fails(cluster: Cluster, client: str, family: str) -> None:
    web = cluster.service().to()
    with (
        socket_in(cluster.client(client), UDP, family_of(web.address(family))) as sock,
        pytest.raises(ConnectionRefusedError),
    ):
        sock.sendto(b"?", (web.address(family), 53))


@both_clients
def test_a_connection_to_a_node_port_without_endpoints_is_rejected(cluster: Cluster, client: str) -> None:
    web = cluster.service(node_port=True).to()
    assert outcome(cluster.client(client), TCP, cluster.node.v4, web.node_port) == REFUSED


def test_unready_endpoints_are_not_used(cluster: Cluster) -> None:
    web = cluster.service().to(PodEndpoint(cluster.a, conditions={"ready": False, "serving": False}))
    assert outcome(cluster.p, TCP, web.v4, 80) == REFUSED
    web.set(publishNotReadyAddresses=True)
    assert outcome(cluster.p, TCP, web.v4, 80) == REFUSED, "the EndpointSlice controller evaluates this field"


@both_clients
def test_internal_policy_local_selects_only_local_endpoints(cluster: Cluster, client: str) -> None:
    web = cluster.service(internalTrafficPolicy="Local").to(cluster.a, elsewhere(cluster.b))
    assert reached(cluster, client, web) == "a"


@both_clients
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
def test_internal_policy_local_without_local_endpoints_drops(
    cluster: Cluster, client: str, protocol: Protocol
) -> None:
    """Dropped, not rejected: the Service has endpoints, but none for this client (KEP-2086)."""
    web = cluster.service(internalTrafficPolicy="Local").to(elsewhere(cluster.b))
    expected = DIFFERENCES[cluster.mode].to(client, protocol, SILENT)
    assert outcome(cluster.client(client), protocol, web.v4, PORTS[protocol], 0.3) == expected


@pytest.mark.backends("ebpf")
def test_sending_a_datagram_that_policy_local_drops_succeeds(cluster: Cluster) -> None:
    web = cluster.service(internalTrafficPolicy="Local").to(elsewhere(cluster.b))
    with socket_in(cluster.p, UDP) as sock:
        assert sock.sendto(b"?", (web.v4, 53)) == 1


def test_internal_policy_local_without_any_endpoints_rejects(cluster: Cluster) -> None:
    web = cluster.service(internalTrafficPolicy="Local").to()
    assert outcome(cluster.p, TCP, web.v4, 80) == REFUSED


@both_clients
def test_external_policy_local_does_not_restrict_pods_and_the_node(cluster: Cluster, client: str) -> None:
    """Pods and the node reach all endpoints by the NodePort, as with kube-proxy (kubernetes #57435)."""
    web = cluster.service(node_port=True, externalTrafficPolicy="Local").to(cluster.a, elsewhere(cluster.b))
    netns = cluster.client(client)
    expected = {"a"} if DIFFERENCES[cluster.mode].one_list else {"a", "b"}
    assert set(answers(netns, TCP, cluster.node.v4, web.node_port, 40)) == expected
    assert reached(cluster, client, web) == "ab"
    web.to(elsewhere(cluster.b))
    assert outcome(netns, TCP, cluster.node.v4, web.node_port) == "b"


@both_clients
def test_hints_keep_a_client_in_its_zone(cluster: Cluster, client: str) -> None:
    def in_zone(pod: Pod, zone: str) -> PodEndpoint:
        return PodEndpoint(pod, node="elsewhere", zone=zone, hints=(zone,))

    web = cluster.service().to(in_zone(cluster.a, ZONE), in_zone(cluster.b, "zone-b"))
    assert reached(cluster, client, web) == "a"
    web.to(in_zone(cluster.a, ZONE), elsewhere(cluster.b))
    assert reached(cluster, client, web) == "ab", "hints apply only if all endpoints have them"
    web.to(in_zone(cluster.b, "zone-b"), in_zone(cluster.c, "zone-c"))
    assert reached(cluster, client, web) == "bc", "hints apply only if an endpoint is for this zone"


@both_clients
def test_terminating_endpoints_serve_while_there_are_no_ready_ones(cluster: Cluster, client: str) -> None:
    """KEP-1669."""
    web = cluster.service().to(terminating(cluster.a), cluster.b)
    assert reached(cluster, client, web) == "b"
    web.to(terminating(cluster.a), terminating(cluster.b, serving=False))
    assert reached(cluster, client, web) == "a"
    web.to(terminating(cluster.a, serving=False))
    assert outcome(cluster.client(client), TCP, web.v4, 80) == REFUSED
