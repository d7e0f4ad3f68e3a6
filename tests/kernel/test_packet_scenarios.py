"""Clients outside, pods of both nodes and the nodes themselves: who answers, and which client it sees.

test_packet_table.py has all frontends with one endpoint and the policies Cluster and Local.
"""

import contextlib
import functools
import itertools
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from ebpfproxy.lab import Pod
from ebpfproxy.linux import sysctl
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
    rejection,
)
from tests.kernel.cluster import TCP_TARGET, UDP_TARGET, PodEndpoint, eventually, terminating
from tests.kernel.scenarios import PORTS, SILENCE, Row, Scenarios, Stage, Steps
from tests.kernel.two_nodes import FRONTENDS, Everywhere, TwoNodes, name_and_client

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(1800)]

FAMILIES = ("v4", "v6")
TARGETS = dict(zip(PORTS, (TCP_TARGET, UDP_TARGET), strict=True))


class Pair(Stage):
    """Services with all kinds of frontends on two nodes."""

    cluster: TwoNodes

    def everywhere(self, *backends: Pod | PodEndpoint, **spec: object) -> Everywhere:
        web = self.cluster.everywhere(**spec)
        web.backends = backends
        self.add(web)
        return web

    def rows(
        self,
        web: Everywhere,
        client: Pod,
        expected: str | Callable[[str], str],
        kinds: tuple[str, ...] = FRONTENDS,
        node: Pod | None = None,
        sources: tuple[str, str] = ("", ""),
    ) -> Iterator[Row]:
        """The client gets this at these frontends, over both protocols and families. `expected`: also by the
        name of the family; `node`: the one whose NodePort it is; `sources`: the client's addresses."""
        for kind in kinds:
            for family, source in zip(FAMILIES, sources, strict=True):
                wanted = expected if isinstance(expected, str) else expected(family)
                for protocol in PORTS:
                    to = web.frontend(kind, family, protocol, node)
                    yield self.row(client, protocol, *to, wanted, source)

    def seen_here(self, name: str, client: Pod) -> Callable[[str], str]:
        """The answer of an endpoint on the first node to an external client, by family."""
        return lambda family: f"{name} {self.cluster.seen_here(client, family)}"


def seen(name: str, client: Pod) -> Callable[[str], str]:
    """The answer of an endpoint that sees the address of this client, by family."""
    return lambda family: f"{name} {getattr(client, family)}"


scenario: Scenarios[Pair] = Scenarios()


def test_clients_get_the_endpoints_of_each_scenario(two_nodes: TwoNodes) -> None:
    two_nodes.await_second()
    scenario.run(two_nodes, lambda: Pair(two_nodes))


# Endpoints


@scenario
def an_endpoint_reaches_itself(at: Pair) -> Steps:
    """Where packets are translated the endpoint sees the node, since the reply would not pass the node
    otherwise."""
    pair = at.cluster
    web, bypassing = at.everywhere(pair.a), pair.lab.bypassing(pair.a)
    yield ()
    pair.await_packets_of(bypassing, web)
    masqueraded = lambda family: f"a {getattr(pair.lab.addresses.gateway(0), family)}"  # noqa: E731
    yield (
        *at.rows(web, pair.a, seen("a", pair.a) if pair.by_socket else masqueraded),
        *at.rows(web, bypassing, masqueraded),
    )


@scenario
def an_endpoint_in_the_network_of_this_node_sees_the_client(at: Pair) -> Steps:
    pair = at.cluster
    webs = [at.everywhere(pair.node, externalTrafficPolicy=policy) for policy in ("Cluster", "Local")]
    rows = list(at.rows(webs[0], pair.node, "host"))
    for web in webs:
        for client in (pair.x, pair.p):
            rows += at.rows(web, client, seen("host", pair.node if at.differences.by_relay else client))
    yield rows


@scenario
def an_endpoint_in_the_network_of_another_node_sees_this_node(at: Pair) -> Steps:
    pair = at.cluster
    web = at.everywhere(pair.second.host)
    inside = [row for client in (pair.p, pair.node) for row in at.rows(web, client, "host-2")]
    yield *at.rows(web, pair.x, seen("host-2", pair.node)), *inside


@scenario
def a_terminating_endpoint_serves_external_clients_if_there_is_no_other(at: Pair) -> Steps:
    """And pods of another node, which cilium #37613 rejected."""
    pair = at.cluster
    web = at.everywhere(terminating(pair.a), externalTrafficPolicy="Local")
    bypassing = pair.lab.bypassing(pair.r)
    ready = at.everywhere(pair.a)
    yield at.rows(web, pair.x, "a", ("NodePort",))
    pair.await_packets_of(bypassing, ready)
    clients = pair.r, bypassing
    yield [row for each in clients for row in at.rows(web, each, "a", ("LoadBalancer", "NodePort"))]
    web.backends = terminating(pair.a), pair.b
    yield [at.row(pair.x, TCP, pair.node.v4, web.node_port, {"b"})]
    web.backends = (terminating(pair.a, serving=False),)
    yield at.rows(web, pair.x, REFUSED, ("NodePort",))


# NodePorts


@scenario
def a_pod_of_another_node_is_an_external_client_of_a_node_port(at: Pair) -> Steps:
    """Policy Local and local endpoints preserve its address."""
    pair = at.cluster
    here, there = at.everywhere(pair.a), at.everywhere(pair.d)
    local, pod = at.everywhere(pair.d, externalTrafficPolicy="Local"), pair.lab.bypassing(pair.r)
    yield (
        *at.rows(here, pod, at.seen_here("a", pair.r), ("NodePort",)),
        *at.rows(there, pod, seen("d", pair.node), ("NodePort",)),
        *at.rows(local, pod, SILENT, ("NodePort",)),
    )


@scenario
def each_node_serves_its_own_node_port_and_no_other_port(at: Pair) -> Steps:
    pair = at.cluster
    web, far = at.everywhere(pair.a), pair.second.host
    yield (
        *at.rows(web, pair.x, at.seen_here("a", pair.x), ("NodePort",)),
        *at.rows(web, pair.x, seen("a", far), ("NodePort",), far),
        at.row(pair.x, TCP, pair.node.v4, TCP_TARGET, f"host {pair.x.v4}"),
        at.row(pair.x, TCP, pair.node.v4, 9, REFUSED),
    )


# Source ranges


@scenario
def source_ranges_restrict_only_the_load_balancer_address(at: Pair) -> Steps:
    """For external clients, the node and pods."""
    pair = at.cluster
    inside, beyond = pair.lab.addresses.further(2)
    admitted = (pair.x, pair.p, pair.node)
    ranges = [f"{each.v4}/32" for each in (*admitted, inside)] + [
        f"{each.v6}/128" for each in (*admitted, inside)
    ]
    web = at.everywhere(pair.a, loadBalancerSourceRanges=ranges)
    balancer = ("LoadBalancer",)
    yield (
        *(row for client in admitted for row in at.rows(web, client, "a", balancer)),
        *at.rows(web, pair.x, "a", balancer, sources=inside),
        *at.rows(web, pair.x, SILENT, balancer, sources=beyond),
        *at.rows(web, pair.q, SILENT, balancer),
        *at.rows(web, pair.q, "a", ("ClusterIP", "NodePort", "ExternalIP")),
    )


@scenario
def source_ranges_apply_to_the_node_and_are_changed(at: Pair) -> Steps:
    pair = at.cluster
    web = at.everywhere(pair.a, loadBalancerSourceRanges=["192.0.2.99/32", "2001:db8:99::/64"])
    yield (
        *at.rows(web, pair.node, SILENT, ("LoadBalancer",)),
        *at.rows(web, pair.x, SILENT, ("LoadBalancer",)),
    )
    web.spec["loadBalancerSourceRanges"] = [f"{pair.x.v4}/32", f"{pair.x.v6}/128"]
    yield (
        *at.rows(web, pair.node, SILENT, ("LoadBalancer",)),
        *at.rows(web, pair.x, at.seen_here("a", pair.x), ("LoadBalancer",)),
    )


@scenario
def source_ranges_apply_to_a_load_balancer_address_that_is_also_an_external_ip(at: Pair) -> Steps:
    """Regression: cilium #44718."""
    pair = at.cluster
    (rejected,) = pair.lab.addresses.further(1)
    web = at.everywhere(pair.a, loadBalancerSourceRanges=[f"{pair.x.v4}/32", f"{pair.x.v6}/128"])
    web.spec["externalIPs"] = list(web.balancer_ips)
    yield (
        *at.rows(web, pair.x, "a", ("LoadBalancer",)),
        *at.rows(web, pair.x, SILENT, ("LoadBalancer",), sources=rejected),
        *at.rows(web, pair.q, SILENT, ("LoadBalancer",)),
    )


# Flows while Services change


@scenario
def without_endpoints_a_client_is_rejected_at_once(at: Pair) -> Steps:
    pair, web = at.cluster, at.everywhere()
    yield ()
    for family, protocol in itertools.product(FAMILIES, PORTS):
        answer, sent_again = rejection(pair.x, protocol, *web.frontend("NodePort", family, protocol))
        assert answer == REFUSED
        assert sent_again <= at.differences.most_retransmissions()


@scenario
def a_udp_flow_leaves_a_removed_endpoint(at: Pair) -> Steps:
    """Also for none. Regression: kubernetes #139628, where the flow of a Service scaled to zero remained for
    hours."""
    pair, web = at.cluster, at.everywhere(at.cluster.a)
    yield ()
    with contextlib.ExitStack() as opened:
        flows = [opened.enter_context(each) for each in dialed(pair, web, UDP)]
        assert [answer(flow) for flow in flows] == ["a", "a"]
        for endpoint, expected in ((pair.d, "d"), (None, REFUSED), (pair.b, "b")):
            web.backends = (endpoint,) if endpoint else ()
            yield ()
            for flow in flows:
                at.differences.await_flow(functools.partial(answer, flow), expected)


@scenario
def a_tcp_connection_survives_the_removal_of_its_endpoint(at: Pair) -> Steps:
    """And of the Service, except where connections belong to a virtual server."""
    pair = at.cluster
    webs = {pod: at.everywhere(pod) for pod in (pair.a, pair.d)}
    yield ()
    with contextlib.ExitStack() as opened:
        flows = {
            pod: [opened.enter_context(each) for each in dialed(pair, web, TCP)] for pod, web in webs.items()
        }

        def assert_continued() -> None:
            for pod, of_pod in flows.items():
                assert [answer(flow) for flow in of_pod] == [pod.name] * 2

        assert_continued()
        for web in webs.values():
            web.backends = (pair.b,)
        yield [row for web in webs.values() for row in at.rows(web, pair.x, "b", ("NodePort",))]
        assert_continued()
        for web in webs.values():
            at.remove(web)
        yield ()
        if not at.differences.ends_with_service:
            assert_continued()


@scenario
def a_connection_from_a_reused_port_selects_an_endpoint_again(at: Pair) -> Steps:
    """The previous connection has ended, so neither its endpoint nor the removal of that endpoint matters."""
    pair, web = at.cluster, at.everywhere()
    for pod in (pair.a, pair.d, pair.b):
        web.backends = (pod,)
        yield ()
        dial = web.dial("NodePort", "v4", TCP)._replace(source=(pair.x.v4, 33333))
        assert [name_of(each) for each in outcomes(pair.x, [dial])] == [pod.name]


def dialed(pair: TwoNodes, web: Everywhere, protocol: Protocol) -> Iterator[socket.socket]:
    """Connections of the external client to the NodePort, one of each family."""
    for family in FAMILIES:
        yield connected(pair.x, protocol, *web.frontend("NodePort", family, protocol))


def answer(flow: socket.socket) -> str:
    try:
        return name_of(converse(flow))
    except ConnectionRefusedError:
        return REFUSED


def name_of(answered: str) -> str:
    return name_and_client(answered)[0]


# Two flows of one port


@scenario.only("ebpf", "nftables", "iptables")  # IPVS identifies flows by client and endpoint
def one_client_port_reaches_one_endpoint_by_several_addresses(at: Pair) -> Steps:
    """Regression: cilium #11810 and #47396. Replies get the frontend address of their flow, though the flows
    look the same to the endpoint."""
    pair = at.cluster
    webs = {pod: at.everywhere(pod) for pod in (pair.a, pair.d)}
    yield ()
    for (pod, web), family, protocol in itertools.product(webs.items(), FAMILIES, PORTS):
        targets = [web.frontend(kind, family, protocol) for kind in FRONTENDS]
        source = (getattr(pair.x, family), next(new_ports))
        with contextlib.ExitStack() as opened:
            flows = [opened.enter_context(connected_from(pair.x, protocol, source, to)) for to in targets]
            for _ in range(2):
                assert [answer(flow) for flow in flows] == [pod.name] * len(flows)
            assert [flow.getpeername()[:2] for flow in flows] == targets


@scenario
def an_external_client_and_the_node_may_use_the_same_port_to_one_endpoint(at: Pair) -> Steps:
    """Regression: cilium #23604. Masqueraded and host-originated packets have the same source address.
    Neither flow may get the other's replies, regardless of their order."""
    pair, web = at.cluster, at.everywhere(at.cluster.d)
    yield ()
    for family, protocol, first in itertools.product(FAMILIES, PORTS, ("node", "outside")):
        port, node = next(new_ports), getattr(pair.node, family)
        endpoint = getattr(pair.d, family), TARGETS[protocol]
        ways = [(pair.node, (node, port), endpoint)]
        ways.append((pair.x, (getattr(pair.x, family), port), (node, web.node_port)))
        with contextlib.ExitStack() as opened:
            flows: list[socket.socket] = []
            for client, source, to in ways if first == "node" else reversed(ways):
                flows.insert(0, opened.enter_context(connected_from(client, protocol, source, to)))
                for _ in range(2):
                    assert [converse(flow) for flow in flows] == [f"d {node}"] * len(flows)


@scenario
def the_node_can_use_a_port_after_a_masqueraded_connection_ended(at: Pair) -> Steps:
    """Entries of an ended connection do not get the replies to the node's own connection."""
    pair, web = at.cluster, at.everywhere(at.cluster.d)
    yield ()
    for family, is_reset in itertools.product(FAMILIES, (False, True)):
        port, node = next(new_ports), getattr(pair.node, family)
        source = getattr(pair.x, family), port
        with connected_from(pair.x, TCP, source, (node, web.node_port)) as previous:
            assert answer(previous) == "d"
            if is_reset:
                previous.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with connected_from(pair.node, TCP, (node, port), (getattr(pair.d, family), TCP_TARGET)) as own:
            assert converse(own) == f"d {node}"


@scenario
def replies_to_the_nodes_own_connection_from_a_node_port_reach_the_node(at: Pair) -> Steps:
    """Regression: cilium #10261. NodePorts and ephemeral ports may overlap (kubernetes #111823). The
    connection may be older than the Service: its replies are not connections to the Service."""
    pair, web, differences = at.cluster, at.everywhere(at.cluster.a), at.differences
    at.remove(web)  # until the node has connected
    ways = list(itertools.product(FAMILIES, PORTS))
    with contextlib.ExitStack() as opened:
        own = {}
        for family, protocol in ways:
            address = getattr(pair.x, family)
            opened.callback(pair.x.serve_echo(protocol, 7070, address).kill)
            source = getattr(pair.node, family), web.node_port
            own[family, protocol] = opened.enter_context(
                connected_from(pair.node, protocol, source, (address, 7070))
            )
        assert [answer(flow) for flow in own.values()] == ["outside"] * len(own)
        at.add(web)
        yield ()
        for (family, protocol), flow in own.items():
            is_taken = protocol is UDP and differences.takes_answers
            served = (
                REFUSED if protocol is UDP and differences.by_relay else "a"
            )  # the relay's port is in use
            for _ in range(3):
                assert answer(flow) == (SILENT if is_taken else "outside")
                frontend = web.frontend("NodePort", family, protocol)
                assert name_of(outcome(pair.x, protocol, *frontend)) == served


# Affinity


@scenario
def an_external_client_keeps_its_endpoint_with_session_affinity(at: Pair) -> Steps:
    """For all frontends together, or for each of them. The clients are spread over the endpoints."""
    pair = at.cluster
    timeout = {"clientIP": {"timeoutSeconds": 60}}
    web = at.everywhere(pair.a, pair.b, pair.d, sessionAffinity="ClientIP", sessionAffinityConfig=timeout)
    yield ()
    for family in FAMILIES:
        chosen: dict[tuple[str, str], set[str]] = {}
        for source in (getattr(each, family) for each in pair.lab.addresses.further(16)):
            # The first connections one by one: two concurrent ones do not see each other's choice.
            for kinds in (FRONTENDS[:1], FRONTENDS, 3 * FRONTENDS):
                dials = [web.dial(kind, family, TCP)._replace(source=(source, 0)) for kind in kinds]
                for kind, answered in zip(kinds, outcomes(pair.x, dials), strict=True):
                    key = source, kind if at.differences.affinity_by_address else ""
                    chosen.setdefault(key, set()).add(name_of(answered))
        assert {client: names for client, names in chosen.items() if len(names) > 1} == {}
        all_chosen = set().union(*chosen.values())
        assert all_chosen <= {"a", "b", "d"}
        assert len(all_chosen) > 1


# Pings


@scenario
def frontend_addresses_answer_pings(at: Pair) -> Steps:
    pair, web = at.cluster, at.everywhere(at.cluster.d)
    yield ()
    answers = at.differences.answers_pings
    # With socket load balancing no program sees the packets of pods.
    clients = (pair.x,) if pair.by_socket else (pair.x, pair.q)
    for family, kind in itertools.product(FAMILIES, ("ClusterIP", "ExternalIP", "LoadBalancer")):
        address, _ = web.frontend(kind, family, TCP)
        for client in clients:
            found = ping(client, address, b"x" * 500, 1.0 if answers else SILENCE)
            assert found == (address if answers else SILENT)
    for address in (pair.node.v4, pair.node.v6):
        assert ping(pair.x, address) == address
    for unknown in ("10.98.255.1", "fd00:10:96:1::ffff"):
        assert ping(pair.x, unknown, timeout=SILENCE) == SILENT


@scenario.only("ebpf", "nftables", "iptables")
def pings_of_another_nodes_address_are_for_that_node(at: Pair) -> Steps:
    """ServiceLB of k3s writes the nodes' addresses into Services. A monitor must notice that a node is
    dead."""
    pair, other = at.cluster, at.cluster.second.host
    at.everywhere(pair.a, externalIPs=[other.v4, other.v6])
    yield ()
    dials = list(itertools.product((pair.q, pair.node, pair.x), (other.v4, other.v6)))
    assert [ping(client, address) for client, address in dials] == [address for _, address in dials]
    settings = "net/ipv4/icmp_echo_ignore_all", "net/ipv6/icmp/echo_ignore_all"
    for setting in settings:
        other.call(functools.partial(sysctl.ensure, setting, "1"))
    try:
        assert {ping(client, address, timeout=SILENCE) for client, address in dials} == {SILENT}
    finally:
        for setting in settings:
            other.call(functools.partial(sysctl.ensure, setting, "0"))


@scenario.only("ebpf")
def pings_of_an_on_link_address_are_for_the_machine_that_has_it(at: Pair) -> Steps:
    """Layer 2 of MetalLB: whether a machine has the address is decided by ARP."""
    pair, address, on_link = at.cluster, "198.51.100.7", "198.51.100.1/24"
    at.everywhere(pair.a, externalIPs=[address])
    yield ()
    clients = pair.x, pair.node
    route = f"{address}/32 via {pair.node.v4}"
    pair.lab.ip(pair.lab.router, f"route add {route}")
    try:
        assert [ping(each, address) for each in clients] == [address] * 2
        pair.lab.ip(pair.node, f"addr add {on_link} dev eth0")
        eventually(lambda: ping(pair.x, address, timeout=SILENCE) == SILENT, "the network is known")
        assert [ping(each, address, timeout=SILENCE) for each in clients] == [SILENT] * 2
        pair.lab.ip(pair.node, f"addr del {on_link} dev eth0")
        eventually(lambda: ping(pair.x, address) == address, "the network is gone")
    finally:
        pair.lab.ip(pair.lab.router, f"route del {route}")


# Apart from the others

apart: Scenarios[Pair] = Scenarios()


def test_a_service_has_an_address_of_the_node(two_nodes: TwoNodes) -> None:
    """In mode ipvs the other node has the address meanwhile, too, and reaches this node no more."""
    apart.run(two_nodes, lambda: Pair(two_nodes))


@apart
def a_load_balancer_address_of_the_node_takes_only_its_ports(at: Pair) -> Steps:
    """Regression: cilium #44430. The node has all other ports, and replies to pings."""
    pair, node = at.cluster, at.cluster.node
    web = at.service(type="LoadBalancer", externalTrafficPolicy="Local")
    web.status = {"loadBalancer": {"ingress": [{"ip": node.v4}, {"ip": node.v6}]}}
    for backends, answer in (((pair.a,), "a"), ((), REFUSED), ((pair.d,), SILENT)):
        web.backends = backends
        rows = [at.row(pair.x, TCP, node.v4, 9, REFUSED)]
        for address in (node.v4, node.v6):
            rows += [at.row(pair.x, protocol, address, port, answer) for protocol, port in PORTS.items()]
            rows += [at.row(pair.x, protocol, address, port, "host") for protocol, port in TARGETS.items()]
        yield rows
        assert [ping(pair.x, address) for address in (node.v4, node.v6)] == [node.v4, node.v6]
