"""Special clients and endpoints: an endpoint as its own client, the nodes, and pods of the other node."""

import functools

import pytest

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.linux import sysctl
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, Dial, outcome, outcomes, ping
from tests.kernel.cluster import TCP_TARGET, eventually
from tests.kernel.differences import DIFFERENCES
from tests.kernel.two_nodes import FRONTENDS, PORTS, Everywhere, TwoNodes, name_and_client

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
PROTOCOLS = (TCP, UDP)


def answers_of_all_frontends(
    web: Everywhere, netns: Pod, family: str, timeout: float = sockets.ANSWERED
) -> set[str]:
    """The answers of all frontends over both protocols."""
    dials = [web.dial(kind, family, protocol, timeout) for kind in FRONTENDS for protocol in PROTOCOLS]
    return set(outcomes(netns, dials))


# An endpoint that is a client of its own Service


@both_families
@pytest.mark.parametrize("by_socket", [True, False], ids=["socket", "bypassing"])
def test_an_endpoint_reaches_itself(two_nodes: TwoNodes, family: str, by_socket: bool) -> None:
    """Where packets are translated the endpoint sees the node, since the reply would not pass the node
    otherwise."""
    web = two_nodes.everywhere().to(two_nodes.a)
    netns = two_nodes.a if by_socket else two_nodes.lab.bypassing(two_nodes.a)
    if not by_socket:
        two_nodes.await_packets_of(netns, web)
    gateway = getattr(two_nodes.lab.addresses.gateway(0), family)
    if by_socket and two_nodes.by_socket:
        assert answers_of_all_frontends(web, netns, family) == {f"a {getattr(two_nodes.a, family)}"}
    else:
        assert answers_of_all_frontends(web, netns, family) == {f"a {gateway}"}


@both_families
def test_the_node_reaches_an_endpoint_in_its_own_network(two_nodes: TwoNodes, family: str) -> None:
    web = two_nodes.everywhere().to(two_nodes.node)
    answers = {name_and_client(answer)[0] for answer in answers_of_all_frontends(web, two_nodes.node, family)}
    assert answers == {"host"}


# Endpoints in the host's network


@both_families
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_a_host_network_endpoint_on_this_node_sees_the_client(
    two_nodes: TwoNodes, family: str, policy: str
) -> None:
    web = two_nodes.everywhere(externalTrafficPolicy=policy).to(two_nodes.node)
    for client in (two_nodes.x, two_nodes.p):
        seen = two_nodes.node if DIFFERENCES[two_nodes.mode].by_relay else client
        assert answers_of_all_frontends(web, client, family) == {f"host {getattr(seen, family)}"}


@both_families
def test_a_host_network_endpoint_on_another_node_sees_this_node(two_nodes: TwoNodes, family: str) -> None:
    web = two_nodes.everywhere().to(two_nodes.second.host)
    assert answers_of_all_frontends(web, two_nodes.x, family) == {f"host-2 {getattr(two_nodes.node, family)}"}
    for client in (two_nodes.p, two_nodes.node):
        answers = {name_and_client(answer)[0] for answer in answers_of_all_frontends(web, client, family)}
        assert answers == {"host-2"}


# Clients on the other node


@both_families
def test_a_pod_of_another_node_is_an_external_client_at_this_nodes_node_port(
    two_nodes: TwoNodes, family: str
) -> None:
    """Its packets are those of an external client: policy Local and local endpoints preserve its address."""
    here, there = two_nodes.everywhere().to(two_nodes.a), two_nodes.everywhere().to(two_nodes.d)
    local = two_nodes.everywhere(externalTrafficPolicy="Local").to(two_nodes.d)
    two_nodes.await_second()
    address, seen = getattr(two_nodes.node, family), two_nodes.seen_here(two_nodes.r, family)
    netns = two_nodes.lab.bypassing(two_nodes.r)
    for protocol in PROTOCOLS:
        assert outcome(netns, protocol, address, here.node_port) == f"a {seen}"
        assert outcome(netns, protocol, address, there.node_port) == f"d {address}"
        assert outcome(netns, protocol, address, local.node_port, 0.3) == SILENT


@both_families
def test_each_node_serves_its_own_node_port(two_nodes: TwoNodes, family: str) -> None:
    two_nodes.await_second()
    web = two_nodes.everywhere().to(two_nodes.a)
    far = two_nodes.second.host
    for protocol in PROTOCOLS:
        at_first = outcome(two_nodes.x, protocol, getattr(two_nodes.node, family), web.node_port)
        at_second = outcome(two_nodes.x, protocol, getattr(far, family), web.node_port)
        assert at_first == f"a {two_nodes.seen_here(two_nodes.x, family)}"
        assert at_second == f"a {getattr(far, family)}"


# Source ranges


@both_families
def test_source_ranges_admit_only_the_clients_that_they_contain(two_nodes: TwoNodes, family: str) -> None:
    """For external clients, the node and pods. Only the load balancer's address is restricted."""
    pair, bits = two_nodes, {"v4": 32, "v6": 128}
    further = pair.lab.addresses.further(2)
    admitted = (pair.x, pair.p, pair.node)
    ranges = [f"{getattr(netns, each)}/{bits[each]}" for netns in admitted for each in bits]
    ranges += [f"{getattr(further[0], each)}/{bits[each]}" for each in bits]
    web = pair.everywhere(loadBalancerSourceRanges=ranges).to(pair.a, pair.d)
    vip, names = web.balancer_ips[family == "v6"], {"a", "d"}
    for protocol in PROTOCOLS:
        for netns in admitted:
            assert name_and_client(outcome(netns, protocol, vip, PORTS[protocol]))[0] in names, netns.name
        inside, beyond = ((getattr(each, family), 0) for each in further)
        at_vip = protocol, vip, PORTS[protocol]
        first, second = outcomes(pair.x, [Dial(*at_vip, source=inside), Dial(*at_vip, 0.3, beyond)])
        assert name_and_client(first)[0] in names
        assert second == SILENT
        assert outcome(pair.q, protocol, vip, PORTS[protocol], 0.3) == SILENT
        for kind in ("ClusterIP", "NodePort", "ExternalIP"):
            assert (
                name_and_client(outcome(pair.q, protocol, *web.frontend(kind, family, protocol)))[0] in names
            )


@both_families
def test_the_nodes_packets_are_dropped_if_no_source_range_contains_it(
    two_nodes: TwoNodes, family: str
) -> None:
    ranges = [f"{two_nodes.x.v4}/32", f"{two_nodes.x.v6}/128"]
    web = two_nodes.everywhere(loadBalancerSourceRanges=ranges).to(two_nodes.a)
    dials = [web.dial("LoadBalancer", family, protocol, 0.3) for protocol in PROTOCOLS]
    expected = [DIFFERENCES[two_nodes.mode].to_node(each, SILENT) for each in PROTOCOLS]
    assert outcomes(two_nodes.node, dials) == expected
    patient = [web.dial("LoadBalancer", family, protocol) for protocol in PROTOCOLS]
    assert set(outcomes(two_nodes.x, patient)) == {f"a {two_nodes.seen_here(two_nodes.x, family)}"}


def test_an_added_source_range_takes_effect_at_once(two_nodes: TwoNodes) -> None:
    web = two_nodes.everywhere(loadBalancerSourceRanges=["192.0.2.0/24"]).to(two_nodes.a)
    vip = web.balancer_ips[0]
    assert outcome(two_nodes.x, TCP, vip, 80, 0.3) == SILENT
    web.set(loadBalancerSourceRanges=["192.0.2.0/24", "172.18.0.0/16"])
    assert outcome(two_nodes.x, TCP, vip, 80) == f"a {two_nodes.seen_here(two_nodes.x, 'v4')}"


# Affinity


@both_families
def test_an_external_client_keeps_its_endpoint_with_session_affinity(
    two_nodes: TwoNodes, family: str
) -> None:
    """For all frontends together, or for each of them. The clients are spread over the endpoints."""
    web = two_nodes.everywhere(
        sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}}
    )
    web.to(two_nodes.a, two_nodes.b, two_nodes.d)
    sources = [getattr(pair, family) for pair in two_nodes.lab.addresses.further(16)]
    by_address = DIFFERENCES[two_nodes.mode].affinity_by_address
    chosen: dict[tuple[str, str], set[str]] = {}
    for source in sources:
        # The first connections one by one: two concurrent ones do not see each other's choice.
        for kinds in (FRONTENDS[:1], FRONTENDS, 3 * FRONTENDS):
            dials = [web.dial(kind, family, TCP)._replace(source=(source, 0)) for kind in kinds]
            for kind, answer in zip(kinds, outcomes(two_nodes.x, dials), strict=True):
                chosen.setdefault((source, kind if by_address else ""), set()).add(name_and_client(answer)[0])
    assert {client: names for client, names in chosen.items() if len(names) > 1} == {}
    all_chosen = set().union(*chosen.values())
    assert all_chosen <= {"a", "b", "d"}
    assert len(all_chosen) > 1


# Node ports


def test_node_ports_answer_only_at_the_addresses_of_nodeport_addresses(two_nodes: TwoNodes) -> None:
    """--nodeport-addresses as CIDRs, and as "primary", which means the addresses of the Node object."""
    pair, extra = two_nodes, "192.0.2.60"
    pair.lab.ip(pair.node, f"addr add {extra}/32 dev lo")
    pair.lab.ip(pair.lab.router, f"route add {extra} via {pair.node.v4}")
    web = pair.everywhere().to(pair.a)

    def answering() -> list[str]:
        dials = [Dial(TCP, address, web.node_port) for address in (pair.node.v4, extra)]
        return [name_and_client(answer)[0] for answer in outcomes(pair.x, dials)]

    try:
        eventually(lambda: answering() == ["a", "a"], "the agent knows the new address")
        pair.restart("--nodeport-addresses=192.0.2.0/24")
        assert answering() == [REFUSED, "a"]
        pair.restart("--nodeport-addresses=primary")
        assert answering() == ["a", REFUSED]
    finally:
        pair.lab.ip(pair.node, f"addr del {extra}/32 dev lo")
        pair.lab.ip(pair.lab.router, f"route del {extra}")
        pair.restart()


def test_a_node_port_leaves_the_nodes_other_ports_alone(two_nodes: TwoNodes) -> None:
    web = two_nodes.everywhere().to(two_nodes.a)
    answers = {port: outcome(two_nodes.x, TCP, two_nodes.node.v4, port) for port in (TCP_TARGET, 9)}
    assert answers == {TCP_TARGET: f"host {two_nodes.x.v4}", 9: REFUSED}
    seen = two_nodes.seen_here(two_nodes.x, "v4")
    assert outcome(two_nodes.x, TCP, two_nodes.node.v4, web.node_port) == f"a {seen}"


# Pings


@both_families
def test_frontend_addresses_answer_pings(two_nodes: TwoNodes, family: str) -> None:
    web = two_nodes.everywhere().to(two_nodes.d)
    seen = not two_nodes.by_socket  # else no program sees the packets of pods
    answers = DIFFERENCES[two_nodes.mode].answers_pings
    for kind in ("ClusterIP", "ExternalIP", "LoadBalancer"):
        address, _ = web.frontend(kind, family, Protocol.TCP)
        for client in (two_nodes.x, two_nodes.q) if seen else (two_nodes.x,):
            found = ping(client, address, b"x" * 500, 1.0 if answers else 0.3)
            assert found == (address if answers else SILENT)
    assert ping(two_nodes.x, getattr(two_nodes.node, family)) == getattr(two_nodes.node, family)
    unknown = "10.98.255.1" if family == "v4" else "fd00:10:96:1::ffff"
    assert ping(two_nodes.x, unknown, timeout=0.3) == SILENT


@both_families
@pytest.mark.ways("ebpf-on", "ebpf-off", "nftables", "iptables")
def test_pings_of_another_nodes_address_are_for_that_node(two_nodes: TwoNodes, family: str) -> None:
    """ServiceLB of k3s writes the nodes' addresses into Services. A monitor must notice that a node is
    dead."""
    other = two_nodes.second.host
    two_nodes.everywhere(externalIPs=[other.v4, other.v6]).to(two_nodes.a)
    address = getattr(other, family)
    setting = "net/ipv4/icmp_echo_ignore_all" if family == "v4" else "net/ipv6/icmp/echo_ignore_all"
    clients = two_nodes.q, two_nodes.node, two_nodes.x
    assert [ping(each, address) for each in clients] == [address] * 3
    other.call(functools.partial(sysctl.ensure, setting, "1"))
    try:
        assert [ping(each, address, timeout=0.3) for each in clients] == [SILENT] * 3
    finally:
        other.call(functools.partial(sysctl.ensure, setting, "0"))


@pytest.mark.ways("ebpf-on", "ebpf-off")
def test_pings_of_an_on_link_address_are_for_the_machine_that_has_it(two_nodes: TwoNodes) -> None:
    """Layer 2 of MetalLB: whether a machine has the address is decided by ARP."""
    address, on_link = "198.51.100.7", "198.51.100.1/24"
    two_nodes.everywhere(externalIPs=[address]).to(two_nodes.a)
    clients = two_nodes.x, two_nodes.node
    route = f"{address}/32 via {two_nodes.node.v4}"
    two_nodes.lab.ip(two_nodes.lab.router, f"route add {route}")
    try:
        assert [ping(each, address) for each in clients] == [address] * 2
        two_nodes.lab.ip(two_nodes.node, f"addr add {on_link} dev eth0")
        eventually(lambda: ping(two_nodes.x, address, timeout=0.3) == SILENT, "the network is known")
        assert [ping(each, address, timeout=0.3) for each in clients] == [SILENT] * 2
        two_nodes.lab.ip(two_nodes.node, f"addr del {on_link} dev eth0")
        eventually(lambda: ping(two_nodes.x, address) == address, "the network is gone")
    finally:
        two_nodes.lab.ip(two_nodes.lab.router, f"route del {route}")


@both_families
@pytest.mark.ways("ebpf-on", "ebpf-off")
def test_a_ping_is_answered_only_if_the_node_serves_the_client(two_nodes: TwoNodes, family: str) -> None:
    """With externalTrafficPolicy Local an external client gets a reply while an endpoint is on the node, also
    when the endpoint returns. Pods and the node itself get one while there is any endpoint."""
    clients = {"outside": two_nodes.x, "pod": two_nodes.q, "node": two_nodes.node}
    web = two_nodes.everywhere(externalTrafficPolicy="Local")
    for endpoint, answering in (
        (two_nodes.d, {"pod", "node"}),
        (two_nodes.a, {"outside", "pod", "node"}),
        (two_nodes.d, {"pod", "node"}),
    ):
        web.to(endpoint)
        for kind in ("ClusterIP", "ExternalIP", "LoadBalancer"):
            address, _ = web.frontend(kind, family, Protocol.TCP)
            expected = {"outside", "pod", "node"} if kind == "ClusterIP" else answering
            for name, client in clients.items():
                answers = name in expected
                found = ping(client, address, timeout=1.0 if answers else 0.3)
                assert found == (address if answers else SILENT), f"{name} pings the {kind}, {endpoint.name}"
