"""Which endpoint a pod and the node reach: policies, hints, terminating endpoints, NodePorts, and changes.

test_packet_table.py has all frontends with one endpoint and the policies Cluster and Local.
"""

import functools
import itertools

import pytest

from ebpfproxy.lab import Pod, manifests
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, outcome, rejection
from tests.kernel.cluster import (
    TCP_TARGET,
    UDP_TARGET,
    ZONE,
    Cluster,
    PodEndpoint,
    elsewhere,
    eventually,
    local_address,
    terminating,
)
from tests.kernel.differences import DIFFERENCES
from tests.kernel.scenarios import Row, Scenarios, Stage, Steps

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(1800)]

scenario: Scenarios[Stage] = Scenarios()


def test_clients_get_the_endpoints_of_each_scenario(cluster: Cluster) -> None:
    scenario.run(cluster, lambda: Stage(cluster))


# Endpoints


@scenario
def all_ready_endpoints_are_used(at: Stage) -> Steps:
    web = at.service(at.cluster.a, at.cluster.b, at.cluster.c, node_port=True)
    yield *at.cluster_ip(web, {"a", "b", "c"}), *at.node_port(web, at.cluster.node.v4, {"a", "b", "c"})


@scenario
def endpoints_that_are_not_ready_are_not_used(at: Stage) -> Steps:
    web = at.service(PodEndpoint(at.cluster.a, conditions={"ready": False, "serving": False}))
    yield at.cluster_ip(web, REFUSED)
    web.spec["publishNotReadyAddresses"] = True  # the EndpointSlice controller evaluates this field
    yield at.cluster_ip(web, REFUSED)


@scenario
def terminating_endpoints_serve_while_there_are_no_ready_ones(at: Stage) -> Steps:
    """KEP-1669."""
    a, b = at.cluster.a, at.cluster.b
    web = at.service(terminating(a), b)
    yield at.cluster_ip(web, {"b"})
    web.backends = terminating(a), terminating(b, serving=False)
    yield at.cluster_ip(web, {"a"})
    web.backends = (terminating(a, serving=False),)
    yield at.cluster_ip(web, REFUSED)


@scenario
def removed_endpoints_are_not_used(at: Stage) -> Steps:
    """Regression: kpng only ever wrote slots, so that those above the new count stayed."""
    pods = at.cluster.a, at.cluster.b, at.cluster.c
    web = at.service()
    for count in (3, 1, 2, 1, 3, 2):
        web.backends = pods[:count]
        yield at.cluster_ip(web, {pod.name for pod in pods[:count]})


@scenario
def tcp_and_udp_of_one_port_have_their_own_endpoints(at: Stage) -> Steps:
    """Regression: kpng's eBPF backend had no protocol in its key, so that 53/TCP and 53/UDP were one."""
    name, address = "dns-both", "10.96.200.1"
    tcp, udp = manifests.port(53, name="tcp"), manifests.port(53, name="udp", protocol="UDP")
    targets = manifests.port(TCP_TARGET, name="tcp"), manifests.port(UDP_TARGET, name="udp", protocol="UDP")
    at.others = [
        manifests.service(name, [address], [tcp, udp]),
        manifests.endpoint_slice("both-a", name, [at.cluster.a.v4], targets[:1]),
        manifests.endpoint_slice("both-b", name, [at.cluster.b.v4], targets[1:]),
    ]
    yield at.row(at.cluster.p, TCP, address, 53, {"a"}), at.row(at.cluster.p, UDP, address, 53, {"b"})


@scenario
def endpoints_are_distinct_although_their_address_plus_port_is_the_same(at: Stage) -> Steps:
    """Regression: kpng's backend id was address plus port, so that 10.0.0.1:81 was 10.0.0.2:80."""
    pods = at.cluster.a, at.cluster.b, at.cluster.c
    ports = [TCP_TARGET + number for number in (700, 701, 702)]
    near = [(pod, port) for pod in pods for port in ports]
    servers = [pod.serve(Protocol.TCP, port, reply=f"{pod.name} {port}") for pod, port in near]
    try:
        rows = []
        for number, (pod, port) in enumerate(near, 1):
            name, address = f"sum-{number}", f"10.96.201.{number}"
            at.others.append(manifests.service(name, [address], [manifests.port(80)]))
            at.others.append(manifests.endpoint_slice(name, name, [pod.v4], [manifests.port(port)]))
            rows.append(at.row(at.cluster.p, TCP, address, 80, f"{pod.name} {port}"))
        yield rows
    finally:
        for server in servers:
            server.kill()


# Policies and hints


@scenario
def internal_policy_local_uses_only_endpoints_on_the_node(at: Stage) -> Steps:
    web = at.service(at.cluster.a, elsewhere(at.cluster.b), internalTrafficPolicy="Local")
    yield at.cluster_ip(web, {"a"})


@scenario
def external_policy_local_does_not_restrict_pods_and_the_node(at: Stage) -> Steps:
    """As with kube-proxy (kubernetes #57435)."""
    a, b = at.cluster.a, elsewhere(at.cluster.b)
    web = at.service(a, b, node_port=True, externalTrafficPolicy="Local")
    both = {"a"} if at.differences.one_list else {"a", "b"}
    yield *at.cluster_ip(web, {"a", "b"}), *at.node_port(web, at.cluster.node.v4, both)
    web.backends = (b,)
    yield at.node_port(web, at.cluster.node.v4, "b")


@scenario
def hints_keep_a_client_in_its_zone(at: Stage) -> Steps:
    def in_zone(pod: Pod, zone: str) -> PodEndpoint:
        return PodEndpoint(pod, node="elsewhere", zone=zone, hints=(zone,))

    web = at.service(in_zone(at.cluster.a, ZONE), in_zone(at.cluster.b, "zone-b"))
    yield at.cluster_ip(web, {"a"})
    web.backends = in_zone(at.cluster.a, ZONE), elsewhere(at.cluster.b)  # an endpoint has no hints
    yield at.cluster_ip(web, {"a", "b"})
    web.backends = in_zone(at.cluster.b, "zone-b"), in_zone(at.cluster.c, "zone-c")  # none for this zone
    yield at.cluster_ip(web, {"b", "c"})


# Addresses


@scenario
def a_socket_to_a_pod_reaches_this_pod(at: Stage) -> Steps:
    at.service(at.cluster.a)
    yield [at.row(at.cluster.p, TCP, at.cluster.b.v4, TCP_TARGET, "b")]


@scenario
def another_port_of_a_cluster_ip_does_not_reach_the_service(at: Stage) -> Steps:
    web = at.service(at.cluster.a)
    yield [at.row(at.cluster.p, TCP, web.v4, 81, at.differences.other_port)]


@scenario
def a_load_balancer_of_ip_mode_proxy_is_not_bypassed(at: Stage) -> Steps:
    """KEP-1860: the load balancer terminates TLS or adds the PROXY protocol."""
    web = at.service(at.cluster.a, type="LoadBalancer")
    addresses = "10.98.200.1", "fd00:10:96:1::c801"
    web.status = {"loadBalancer": {"ingress": [{"ip": each, "ipMode": "Proxy"} for each in addresses]}}
    yield [at.row(client, TCP, each, 80, SILENT) for client in at.clients for each in addresses]


@scenario
def a_removed_external_ip_does_not_answer(at: Stage) -> Steps:
    address = "10.98.200.2"
    web = at.service(at.cluster.a, externalIPs=[address])
    yield at.ports(address, "a")
    web.spec["externalIPs"] = []
    yield at.row(at.cluster.p, TCP, address, 80, SILENT), at.row(at.cluster.p, TCP, web.v4, 80, "a")


@scenario
def an_external_ip_that_the_node_has_takes_only_the_services_port(at: Stage) -> Steps:
    """Regression: cilium #44430, where the node became unreachable on all its other ports."""
    node = at.cluster.node
    host = node.serve(Protocol.TCP, 7022, reply="the node")
    try:
        at.service(at.cluster.a, externalIPs=[node.v4, node.v6])
        rows = [Row(at.cluster.lab.outside, TCP, node.v4, 7022, "the node")]
        rows.append(at.row(at.cluster.node, TCP, "127.0.0.1", 80, REFUSED))
        for client in at.clients:
            for address in (node.v4, node.v6):
                for port, answer in ((80, "a"), (7022, "the node"), (7023, REFUSED)):
                    rows.append(at.row(client, TCP, address, port, answer))
        yield rows
    finally:
        host.kill()


@scenario
def a_cluster_ip_is_changed(at: Stage) -> Steps:
    web = at.service(at.cluster.a)
    yield at.cluster_ip(web, "a")
    previous, web.v4 = web.v4, "10.96.202.1"
    yield *at.cluster_ip(web, "a"), at.row(at.cluster.p, TCP, previous, 80, at.differences.without_service)


@scenario
def a_service_is_deleted_and_another_one_gets_its_cluster_ip(at: Stage) -> Steps:
    web = at.service(at.cluster.a, node_port=True)
    yield at.cluster_ip(web, "a")
    at.remove(web)
    gone = at.differences.without_service
    silent = [at.row(at.cluster.p, TCP, each, 80, gone) for each in (web.v4, web.v6)]
    yield *silent, at.row(at.cluster.p, TCP, at.cluster.node.v4, web.node_port, REFUSED)
    latter = at.service(at.cluster.b)
    latter.v4, latter.v6 = web.v4, web.v6
    yield at.cluster_ip(latter, {"b"})


# NodePorts


@scenario
def a_node_port_answers_at_the_addresses_of_the_node(at: Stage) -> Steps:
    web, node = at.service(at.cluster.a, node_port=True), at.cluster.node
    gateway = at.cluster.lab.addresses.gateway(0)
    answering = [row for to in (node.v4, node.v6, *gateway) for row in at.node_port(web, to, "a")]
    own = at.cluster.p.v4, "0.0.0.0"
    of_pod = [at.row(at.cluster.p, each, to, web.node_port, REFUSED) for each in (TCP, UDP) for to in own]
    other = [at.row(client, TCP, at.cluster.lab.outside.v4, web.node_port, REFUSED) for client in at.clients]
    yield *answering, *of_pod, *other


@scenario
def a_node_port_answers_the_node_at_its_loopback_addresses(at: Stage) -> Steps:
    """Regression: 127.0.0.1:nodePort from the host; without route_localnet, and for IPv6 too."""
    web = at.service(at.cluster.a, node_port=True)
    expected = functools.partial(at.differences.at_loopback, outcome="a")
    yield [
        Row(at.cluster.node, protocol, address, web.node_port, expected(protocol, address))
        for protocol in (TCP, UDP)
        for address in ("127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1")
    ]


@scenario
def a_pods_loopback_addresses_are_its_own(at: Stage) -> Steps:
    web = at.service(at.cluster.a, node_port=True)
    own = [at.cluster.p.serve(protocol, web.node_port, reply="p's own") for protocol in (TCP, UDP)]
    try:
        addresses = "127.0.0.1", "::1"
        yield [
            at.row(at.cluster.p, each, to, web.node_port, "p's own")
            for each in (TCP, UDP)
            for to in addresses
        ]
    finally:
        for server in own:
            server.kill()


@scenario
def other_ports_of_the_node_reach_the_node(at: Stage) -> Steps:
    web, node = at.service(at.cluster.a, node_port=True), at.cluster.node
    other = web.node_port + 1000
    host = node.serve(Protocol.TCP, other, reply="the node")
    try:
        of_node = [at.row(client, TCP, node.v4, other, "the node") for client in at.clients]
        yield *of_node, at.row(at.cluster.node, TCP, "127.0.0.1", other, "the node")
    finally:
        host.kill()


@scenario
def a_node_port_is_changed(at: Stage) -> Steps:
    web, node = at.service(at.cluster.a, node_port=True), at.cluster.node
    yield at.node_port(web, node.v4, "a")
    previous, web.node_port = web.node_port, web.node_port + 1500
    yield *at.node_port(web, node.v4, "a"), at.row(at.cluster.p, TCP, node.v4, previous, REFUSED)


# Other tests


def test_without_endpoints_a_connection_is_rejected_at_once(cluster: Cluster) -> None:
    differences = DIFFERENCES[cluster.mode]
    web = cluster.service().to()
    for client, address, (protocol, port) in itertools.product(
        ("pod", "node"), (web.v4, web.v6), ((TCP, 80), (UDP, 53))
    ):
        answer, sent_again = rejection(cluster.client(client), protocol, address, port)
        assert answer == differences.to(client, protocol, REFUSED)
        assert sent_again <= differences.most_retransmissions()


@pytest.mark.parametrize("address", ["192.0.2.7/32", "2001:db8::7/128"])
def test_a_node_port_answers_on_an_added_address_until_it_is_removed(cluster: Cluster, address: str) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    dialed = address.partition("/")[0]
    assert outcome(cluster.p, TCP, dialed, web.node_port, 0.2) != "a"
    with local_address(cluster, address):
        eventually(lambda: outcome(cluster.p, TCP, dialed, web.node_port, 0.2) == "a", "the new address")
        assert outcome(cluster.node, TCP, dialed, web.node_port) == "a"
    eventually(lambda: outcome(cluster.p, TCP, dialed, web.node_port, 0.2) != "a", "the address is gone")
