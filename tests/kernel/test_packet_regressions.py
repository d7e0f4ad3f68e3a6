"""Bugs of other projects' packet paths, one test each. Those about sizes are in test_packet_sizes.py."""

import contextlib
import socket
import struct

import pytest

from ebpfproxy.backends.ebpf.programs import LOADED
from ebpfproxy.lab import sockets
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import (
    REFUSED,
    SILENT,
    TCP,
    UDP,
    connected,
    connected_from,
    converse,
    new_ports,
    outcome,
    outcomes,
    ping,
)
from tests.kernel.cluster import TCP_TARGET, UDP_TARGET, terminating
from tests.kernel.differences import DIFFERENCES
from tests.kernel.two_nodes import FRONTENDS, PORTS, TwoNodes, name_and_client

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
TARGETS = {TCP: TCP_TARGET, UDP: UDP_TARGET}


def name_of(answer: str) -> str:
    return name_and_client(answer)[0]


@pytest.mark.ways("ebpf-on")
def test_a_flow_map_of_odd_size_is_kept_by_a_restart(two_nodes: TwoNodes) -> None:
    """Regression: cilium commit 4b203506e5. The kernel rounds the size of an LRU map. The agent found another
    size than it had requested, and created the map again and again."""
    assert any(flag.startswith("--ebpf-flows-max=") and int(flag[-1]) % 2 for flag in two_nodes.flags)
    web = two_nodes.everywhere().to(two_nodes.d)
    previous = {path.name for path in two_nodes.lab.bpffs.glob("programs-*")}
    with connected(two_nodes.x, TCP, two_nodes.node.v4, web.node_port) as sock:
        assert name_of(converse(sock)) == "d"
        two_nodes.restart()
        assert name_of(converse(sock)) == "d"
    assert {path.name for path in two_nodes.lab.bpffs.glob("programs-*")} == previous
    assert LOADED not in two_nodes.agent.log()


@both_families
def test_a_udp_flow_is_rejected_without_endpoints_and_recovers(two_nodes: TwoNodes, family: str) -> None:
    """Regression: kubernetes #139628, where the flow of a Service scaled to zero remained for hours."""
    web = two_nodes.everywhere().to(two_nodes.d)
    with connected(two_nodes.x, UDP, getattr(two_nodes.node, family), web.node_port) as sock:
        assert name_of(converse(sock)) == "d"
        web.to()
        DIFFERENCES[two_nodes.mode].await_flow(lambda: _conversed(sock), REFUSED)
        web.to(two_nodes.b)
        DIFFERENCES[two_nodes.mode].await_flow(lambda: _conversed(sock), "b")


def _conversed(sock: socket.socket) -> str:
    try:
        return name_of(converse(sock))
    except ConnectionRefusedError:
        return REFUSED


@both_families
@pytest.mark.parametrize("endpoints", ["some", "none", "elsewhere"])
def test_a_load_balancer_address_that_is_a_node_address_takes_only_its_port(
    two_nodes: TwoNodes, family: str, endpoints: str
) -> None:
    """Regression: cilium #44430. The Service has one port of the address. The node has all others, and
    replies to pings."""
    pair = two_nodes
    web = pair.service(type="LoadBalancer", externalTrafficPolicy="Local")
    web.status = {"loadBalancer": {"ingress": [{"ip": pair.node.v4}, {"ip": pair.node.v6}]}}
    web.to(*{"some": [pair.a], "none": [], "elsewhere": [pair.d]}[endpoints])
    address = getattr(pair.node, family)
    try:
        expected = {"some": "a", "none": REFUSED, "elsewhere": SILENT}[endpoints]
        for protocol in (TCP, UDP):
            timeout = 0.3 if expected == SILENT else sockets.ANSWERED
            assert name_of(outcome(pair.x, protocol, address, PORTS[protocol], timeout)) == expected
            assert name_of(outcome(pair.x, protocol, address, TARGETS[protocol])) == "host"
        assert outcome(pair.x, TCP, address, 9) == REFUSED
        assert ping(pair.x, address) == address
    finally:
        pair.write(web.name)


@both_families
def test_source_ranges_apply_to_a_load_balancer_address_that_is_also_an_external_ip(
    two_nodes: TwoNodes, family: str
) -> None:
    """Regression: cilium #44718. Source ranges restrict load balancer addresses, also where the Service lists
    the address among its external IPs."""
    ranges = [f"{two_nodes.x.v4}/32", f"{two_nodes.x.v6}/128"]
    web = two_nodes.everywhere(loadBalancerSourceRanges=ranges).to(two_nodes.a)
    web.set(externalIPs=list(web.balancer_ips))
    rejected = getattr(two_nodes.lab.addresses.further(1)[0], family)
    for protocol in (TCP, UDP):
        dial = web.dial("LoadBalancer", family, protocol, 0.3)
        assert name_of(outcome(two_nodes.x, *dial[:3])) == "a"
        assert outcome(two_nodes.q, *dial[:3], 0.3) == SILENT
        assert outcomes(two_nodes.x, [dial._replace(source=(rejected, 0))]) == [SILENT]


@both_families
def test_session_affinity_survives_syncs_and_restarts(two_nodes: TwoNodes, family: str) -> None:
    """Regression: calico commit 0bbaba8fc1, where each sync deleted the affinity of UDP clients, since two
    parts of the program wrote the same table."""
    pair = two_nodes
    web = pair.everywhere(
        sessionAffinity="ClientIP", sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}}
    ).to(pair.a, pair.b, pair.c, pair.d)
    clients = (pair.x, pair.p, pair.node)

    def chosen() -> list[str]:
        dials = [web.dial("ClusterIP", family, UDP), web.dial("NodePort", family, UDP)]
        return [name_of(answer) for netns in clients for answer in outcomes(netns, dials)]

    chosen()  # concurrent first connections may choose different endpoints
    first_choice = chosen()
    assert set(first_choice) <= {"a", "b", "c", "d"}
    syncs = len(pair.agent.lines)
    pair.everywhere().to(pair.a)
    web.to(pair.a, pair.b, pair.c, pair.d, pair.e)
    assert len(pair.agent.lines) > syncs
    assert chosen() == first_choice
    if not DIFFERENCES[pair.mode].by_relay:  # whose tables end with the agent
        pair.restart()
        assert chosen() == first_choice


@pytest.mark.ways(
    "ebpf-on", "ebpf-off", "nftables", "iptables"
)  # IPVS identifies flows by client and endpoint
@both_families
@both_protocols
@pytest.mark.parametrize("place", ["here", "there"])
def test_one_client_port_reaches_one_endpoint_by_several_addresses(
    two_nodes: TwoNodes, family: str, protocol: Protocol, place: str
) -> None:
    """Regression: cilium #11810 and #47396. Replies get the frontend address of their flow, though the flows
    look the same to the endpoint."""
    pair, pod = two_nodes, two_nodes.a if place == "here" else two_nodes.d
    web = pair.everywhere().to(pod)
    dialed = [web.frontend(kind, family, protocol) for kind in FRONTENDS]
    source = (getattr(pair.x, family), next(new_ports))
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected_from(pair.x, protocol, source, to)) for to in dialed]
        for _ in range(2):
            for client in clients:
                assert name_of(converse(client)) == pod.name
        assert [client.getpeername()[:2] for client in clients] == dialed


@both_families
@both_protocols
@pytest.mark.parametrize("first", ["node", "outside"])
def test_an_external_client_and_the_node_may_use_the_same_port_to_one_endpoint(
    two_nodes: TwoNodes, family: str, protocol: Protocol, first: str
) -> None:
    """Regression: cilium #23604. Masqueraded and host-originated packets have the same source address.
    Neither flow may get the other's replies, regardless of their order."""
    pair, port = two_nodes, next(new_ports)
    web = pair.everywhere().to(pair.d)
    node, endpoint = getattr(pair.node, family), (getattr(pair.d, family), TARGETS[protocol])

    def by_node() -> socket.socket:
        return connected_from(pair.node, protocol, (node, port), endpoint)

    def from_outside() -> socket.socket:
        return connected_from(pair.x, protocol, (getattr(pair.x, family), port), (node, web.node_port))

    one, other = (by_node, from_outside) if first == "node" else (from_outside, by_node)
    with one() as earlier:
        assert converse(earlier) == f"d {node}"
        with other() as later:
            for _ in range(2):
                assert converse(later) == f"d {node}"
                assert converse(earlier) == f"d {node}"


@both_families
@pytest.mark.parametrize("end", ["closed", "reset"])
def test_the_node_can_use_a_port_after_a_masqueraded_connection_ended(
    two_nodes: TwoNodes, family: str, end: str
) -> None:
    """Entries of an ended connection do not get the replies to the node's own connection."""
    pair, port = two_nodes, next(new_ports)
    web = pair.everywhere().to(pair.d)
    node, endpoint = getattr(pair.node, family), (getattr(pair.d, family), TCP_TARGET)
    with connected_from(pair.x, TCP, (getattr(pair.x, family), port), (node, web.node_port)) as previous:
        assert name_of(converse(previous)) == "d"
        if end == "reset":
            previous.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with connected_from(pair.node, TCP, (node, port), endpoint) as own:
        assert converse(own) == f"d {node}"


@both_families
@both_protocols
def test_replies_to_the_nodes_own_connection_from_a_node_port_reach_the_node(
    two_nodes: TwoNodes, family: str, protocol: Protocol
) -> None:
    """Regression: cilium #10261. NodePorts and ephemeral ports may overlap (kubernetes #111823). The
    connection may be older than the Service: its replies are not connections to the Service."""
    pair, web = two_nodes, two_nodes.everywhere()
    differences = DIFFERENCES[pair.mode]
    taken = protocol is UDP and differences.takes_answers
    served = REFUSED if protocol is UDP and differences.by_relay else "a"  # the port of a relay is in use
    server = pair.x.serve_echo(protocol, 7070, getattr(pair.x, family))
    source, to = (getattr(pair.node, family), web.node_port), (getattr(pair.x, family), 7070)
    try:
        with connected_from(pair.node, protocol, source, to) as own:
            assert name_of(converse(own)) == "outside"
            web.to(pair.a)
            for _ in range(3):
                assert name_of(converse(own)) == (SILENT if taken else "outside")
                assert name_of(outcome(pair.x, protocol, source[0], web.node_port)) == served
    finally:
        server.kill()


@both_families
@pytest.mark.parametrize("by_socket", [True, False], ids=["socket", "bypassing"])
def test_a_terminating_endpoint_of_policy_local_serves_pods_of_another_node(
    two_nodes: TwoNodes, family: str, by_socket: bool
) -> None:
    """Regression: cilium #37613, and its upstream conformance test. The pod connects to the load balancer's
    address, and to the NodePort of the endpoint's node."""
    pair = two_nodes
    pair.await_second()
    ready = pair.everywhere().to(pair.a)
    web = pair.everywhere(externalTrafficPolicy="Local").to(terminating(pair.a))
    netns = pair.r if by_socket else pair.lab.bypassing(pair.r)
    if not by_socket:
        pair.await_packets_of(netns, ready)
    for protocol in (TCP, UDP):
        for kind in ("LoadBalancer", "NodePort"):
            assert name_of(outcome(netns, protocol, *web.frontend(kind, family, protocol))) == "a"


@both_families
@pytest.mark.parametrize("client", ["pod", "bypassing", "node"])
def test_external_policy_local_lets_pods_and_nodes_reach_remote_endpoints(
    two_nodes: TwoNodes, family: str, client: str
) -> None:
    """Regression: cilium #45252. The node of these clients has no endpoint."""
    pair = two_nodes
    web = pair.everywhere(externalTrafficPolicy="Local").to(pair.d)
    netns = {"pod": pair.p, "bypassing": pair.lab.bypassing(pair.p), "node": pair.node}[client]
    if client == "bypassing":
        pair.await_packets_of(netns, web)
    rows = [
        (kind, protocol) for kind in ("LoadBalancer", "ExternalIP", "NodePort") for protocol in (TCP, UDP)
    ]
    answers = outcomes(netns, [web.dial(kind, family, protocol) for kind, protocol in rows])
    assert {row: name_of(answer) for row, answer in zip(rows, answers, strict=True)} == dict.fromkeys(
        rows, "d"
    )
    rejected = [web.dial("LoadBalancer", family, protocol, 0.3) for protocol in (TCP, UDP)]
    assert outcomes(pair.x, rejected) == [SILENT, SILENT]
