"""Special clients and endpoints: those that are the same, the nodes themselves, those of other nodes."""

import pytest

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, Dial, outcome, outcomes, ping
from tests.kernel.cluster import TCP_TARGET
from tests.kernel.differences import DIFFERENCES
from tests.kernel.two_nodes import FRONTENDS, PORTS, Everywhere, TwoNodes, name_and_client

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
PROTOCOLS = (TCP, UDP)


def everybody(web: Everywhere, place: Pod, family: str, timeout: float = sockets.ANSWERED) -> set[str]:
    """What all frontends answer over both protocols."""
    dials = [web.dial(kind, family, protocol, timeout) for kind in FRONTENDS for protocol in PROTOCOLS]
    return set(outcomes(place, dials))


# An endpoint that dials its own Service


@both_families
@pytest.mark.parametrize("by_socket", [True, False], ids=["socket", "bypassing"])
def test_an_endpoint_reaches_itself(two_nodes: TwoNodes, family: str, by_socket: bool) -> None:
    """Where packets are translated it sees the node, since it would answer itself otherwise."""
    web = two_nodes.everywhere().to(two_nodes.a)
    place = two_nodes.a if by_socket else two_nodes.lab.bypassing(two_nodes.a)
    if not by_socket:
        two_nodes.await_packets_of(place, web)
    gateway = getattr(two_nodes.lab.addresses.gateway(0), family)
    if by_socket and two_nodes.by_socket:
        assert everybody(web, place, family) == {f"a {getattr(two_nodes.a, family)}"}
    else:
        assert everybody(web, place, family) == {f"a {gateway}"}


@both_families
def test_the_node_reaches_an_endpoint_that_is_itself(two_nodes: TwoNodes, family: str) -> None:
    web = two_nodes.everywhere().to(two_nodes.node)
    answers = {name_and_client(answer)[0] for answer in everybody(web, two_nodes.node, family)}
    assert answers == {"host"}


# Endpoints in the host's network


@both_families
@pytest.mark.parametrize("policy", ["Cluster", "Local"])
def test_an_endpoint_in_this_nodes_network_sees_the_client(
    two_nodes: TwoNodes, family: str, policy: str
) -> None:
    web = two_nodes.everywhere(externalTrafficPolicy=policy).to(two_nodes.node)
    for client in (two_nodes.x, two_nodes.p):
        assert everybody(web, client, family) == {f"host {getattr(client, family)}"}


@both_families
def test_an_endpoint_in_another_nodes_network_sees_this_node(two_nodes: TwoNodes, family: str) -> None:
    web = two_nodes.everywhere().to(two_nodes.second.host)
    assert everybody(web, two_nodes.x, family) == {f"host-2 {getattr(two_nodes.node, family)}"}
    for client in (two_nodes.p, two_nodes.node):
        answers = {name_and_client(answer)[0] for answer in everybody(web, client, family)}
        assert answers == {"host-2"}


# Clients on the other node


@both_families
def test_a_pod_of_another_node_at_this_nodes_port(two_nodes: TwoNodes, family: str) -> None:
    """By its packets it is a client outside: policy Local keeps its address, and so does a local endpoint."""
    here, there = two_nodes.everywhere().to(two_nodes.a), two_nodes.everywhere().to(two_nodes.d)
    local = two_nodes.everywhere(externalTrafficPolicy="Local").to(two_nodes.d)
    two_nodes.await_second()
    address, seen = getattr(two_nodes.node, family), two_nodes.seen_here(two_nodes.r, family)
    place = two_nodes.lab.bypassing(two_nodes.r)
    for protocol in PROTOCOLS:
        assert outcome(place, protocol, address, here.node_port) == f"a {seen}"
        assert outcome(place, protocol, address, there.node_port) == f"d {address}"
        assert outcome(place, protocol, address, local.node_port, 0.3) == SILENT


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
def test_source_ranges_admit_those_that_they_hold(two_nodes: TwoNodes, family: str) -> None:
    """Outside, on the node, and in pods; only the load balancer's address is restricted."""
    pair, bits = two_nodes, {"v4": 32, "v6": 128}
    further = pair.lab.addresses.further(2)
    admitted = (pair.x, pair.p, pair.node)
    ranges = [f"{getattr(place, each)}/{bits[each]}" for place in admitted for each in bits]
    ranges += [f"{getattr(further[0], each)}/{bits[each]}" for each in bits]
    web = pair.everywhere(loadBalancerSourceRanges=ranges).to(pair.a, pair.d)
    vip, names = web.balancer_ips[family == "v6"], {"a", "d"}
    for protocol in PROTOCOLS:
        for place in admitted:
            assert name_and_client(outcome(place, protocol, vip, PORTS[protocol]))[0] in names, place.name
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
def test_the_node_is_refused_where_no_range_holds_it(two_nodes: TwoNodes, family: str) -> None:
    ranges = [f"{two_nodes.x.v4}/32", f"{two_nodes.x.v6}/128"]
    web = two_nodes.everywhere(loadBalancerSourceRanges=ranges).to(two_nodes.a)
    dials = [web.dial("LoadBalancer", family, protocol, 0.3) for protocol in PROTOCOLS]
    told = [DIFFERENCES[two_nodes.mode].to_node(each, SILENT) for each in PROTOCOLS]
    assert outcomes(two_nodes.node, dials) == told
    patient = [web.dial("LoadBalancer", family, protocol) for protocol in PROTOCOLS]
    assert set(outcomes(two_nodes.x, patient)) == {f"a {two_nodes.seen_here(two_nodes.x, family)}"}


def test_a_source_range_that_is_added_is_in_force_at_once(two_nodes: TwoNodes) -> None:
    web = two_nodes.everywhere(loadBalancerSourceRanges=["192.0.2.0/24"]).to(two_nodes.a)
    vip = web.balancer_ips[0]
    assert outcome(two_nodes.x, TCP, vip, 80, 0.3) == SILENT
    web.set(loadBalancerSourceRanges=["192.0.2.0/24", "172.18.0.0/16"])
    assert outcome(two_nodes.x, TCP, vip, 80) == f"a {two_nodes.seen_here(two_nodes.x, 'v4')}"


# Affinity


@both_families
def test_a_client_outside_keeps_its_endpoint(two_nodes: TwoNodes, family: str) -> None:
    """Over all frontends, or at each; and clients are told apart, so that all endpoints get some of them."""
    web = two_nodes.everywhere(
        sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}}
    )
    web.to(two_nodes.a, two_nodes.b, two_nodes.d)
    sources = [getattr(pair, family) for pair in two_nodes.lab.addresses.further(16)]
    by_address = DIFFERENCES[two_nodes.mode].affinity_by_address
    chosen: dict[tuple[str, str], set[str]] = {}
    for source in sources:
        # One by one what is new: of two at the same time neither finds what the other one has chosen.
        for kinds in (FRONTENDS[:1], FRONTENDS, 3 * FRONTENDS):
            dials = [web.dial(kind, family, TCP)._replace(source=(source, 0)) for kind in kinds]
            for kind, answer in zip(kinds, outcomes(two_nodes.x, dials), strict=True):
                chosen.setdefault((source, kind if by_address else ""), set()).add(name_and_client(answer)[0])
    assert {client: names for client, names in chosen.items() if len(names) > 1} == {}
    everybody_chosen = set().union(*chosen.values())
    assert everybody_chosen <= {"a", "b", "d"}
    assert len(everybody_chosen) > 1


# Node ports


def test_node_ports_answer_at_the_chosen_addresses_only(two_nodes: TwoNodes) -> None:
    """--nodeport-addresses as CIDRs, and as "primary": those of the Node object."""
    pair, extra = two_nodes, "192.0.2.60"
    pair.lab.ip(pair.node, f"addr add {extra}/32 dev lo")
    pair.lab.ip(pair.lab.router, f"route add {extra} via {pair.node.v4}")
    web = pair.everywhere().to(pair.a)

    def answering() -> list[str]:
        dials = [Dial(TCP, address, web.node_port) for address in (pair.node.v4, extra)]
        return [name_and_client(answer)[0] for answer in outcomes(pair.x, dials)]

    try:
        assert answering() == ["a", "a"]
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
def test_an_address_with_a_frontend_answers_a_ping(two_nodes: TwoNodes, family: str) -> None:
    web = two_nodes.everywhere().to(two_nodes.d)
    seen = not two_nodes.by_socket  # else nobody looks at the packets of pods
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
@pytest.mark.ways("ebpf-on", "ebpf-off")
def test_a_ping_is_answered_where_the_node_serves_the_client(two_nodes: TwoNodes, family: str) -> None:
    """With externalTrafficPolicy Local a client outside gets an answer while an endpoint is on the node, also
    when the endpoint returns. Pods and the node itself get one as long as there is an endpoint anywhere."""
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
