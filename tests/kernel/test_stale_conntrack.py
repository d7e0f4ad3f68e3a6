"""Conntrack entries through nft rules, in network namespaces of the test: which are deleted, which stay.

Each test writes the node's rules as a backend would, and passes the matching plans to the thread.
"""

import queue
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.netfilter.stale_conntrack import SearchResult, StaleConntrack
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import conntrack, local_addresses, netlink
from ebpfproxy.model.address import Address, Family, Protocol, parse_address
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.model.service import ServiceType
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import Frontend, NodePlan, PlanKey, ServicePortPlan
from tests.kernel.nat_testbed import DNS, PATIENCE, TARGET, TCP, UDP, Testbed, answers, end_all_flows
from tests.support import build
from tests.support.build import CONTEXT, endpoint, port, slice_of

pytestmark = pytest.mark.kernel

NODE_PORT, FOREIGN_PORT = 30053, 8053
Plans = dict[PlanKey, ServicePortPlan | None]


@pytest.fixture(params=list(Family), ids=lambda of: of.value)
def testbed(request: pytest.FixtureRequest, testbeds: dict[Family, Testbed]) -> Iterator[Testbed]:
    made = testbeds[request.param]
    made.rules()
    yield made
    end_all_flows(made)


class Watched:
    """The thread in the node's namespace, and the looks that it reported."""

    def __init__(self, testbed: Testbed) -> None:
        self._looks: queue.SimpleQueue[SearchResult] = queue.SimpleQueue()
        with testbed.node.entered():
            self.stale = StaleConntrack(self._looks.put)
            networks = local_addresses.read()
        self.stale.expect({}, NodePlan(local_networks=networks, node_port_networks=networks))

    def bring(self, changed: Plans) -> tuple[int, int]:
        """As after a sync. The numbers of deleted entries and of those that could not be deleted."""
        self.stale.expect(changed)
        self.stale.in_force()
        look = self._looks.get(timeout=PATIENCE)
        return look.deleted, look.failed


@pytest.fixture
def watched(testbed: Testbed) -> Iterator[Watched]:
    made = Watched(testbed)
    yield made
    made.stale.close()


def plans(testbed: Testbed, *pods: int, called: str = "dns", protocol: Protocol = UDP) -> Plans:
    """The plans of a Service with the testbed's ClusterIP, a NodePort, and these pods as endpoints."""
    service = build.service(
        called,
        port(DNS, protocol=protocol, node_port=NODE_PORT),
        ips=(testbed.at.vip,),
        type_=ServiceType.NODE_PORT,
    )
    endpoints = [endpoint(testbed.at.pods[pod]) for pod in pods]
    ports = [EndpointPort("", protocol, TARGET)]
    slices = [slice_of(called, *endpoints, ports=ports)] if endpoints else []
    return {plan.key: plan for plan in plan_service(service, slices, None, CONTEXT)}


@pytest.mark.parametrize("origin", ["client", "node"])
def test_flows_of_a_removed_endpoint_move_and_others_stay(
    testbed: Testbed, watched: Watched, origin: str
) -> None:
    where = testbed.client if origin == "client" else testbed.node
    testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[0]))
    with (
        testbed.pod(0) as first,
        testbed.pod(1) as second,
        testbed.client_socket(where, testbed.at.vip) as client,
    ):
        answers(client, first)
        assert watched.bring(plans(testbed, 0)) == (0, 0)
        testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[1]))
        with testbed.client_socket(where, testbed.at.vip) as late:
            answers(late, second)
            (stays,) = [flow for flow in testbed.flows() if flow.source_port == late.getsockname()[1]]
            assert watched.bring(plans(testbed, 1)) == (1, 0)
            assert testbed.flows() == [stays]
            answers(client, second)
            answers(late, second)
            assert stays in testbed.flows()


def test_a_service_scaled_to_zero_keeps_no_flow(testbed: Testbed, watched: Watched) -> None:
    testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[0]))
    with testbed.pod(0) as server, testbed.client_socket(testbed.client, testbed.at.vip) as client:
        answers(client, server)
        assert watched.bring(plans(testbed, 0)) == (0, 0)
        testbed.rules(dns=(testbed.at.vip, DNS, ""))
        assert watched.bring(plans(testbed)) == (1, 0)
        assert testbed.flows() == []


def test_a_flow_from_before_the_first_endpoint_reaches_that_endpoint(
    testbed: Testbed, watched: Watched
) -> None:
    """The client sends without a pause, so that its entry would never expire (kubernetes issue 19029)."""
    watched.bring(plans(testbed))
    with testbed.pod(0) as server, testbed.client_socket(testbed.node, testbed.at.vip) as client:
        client.send(b"?")
        (lost,) = testbed.flows()
        assert (lost.reply_source, lost.is_dnated) == (parse_address(testbed.at.vip), False)
        testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[0]))
        client.send(b"?")
        assert [flow.id for flow in testbed.flows()] == [lost.id]  # the rule alone changes nothing
        assert watched.bring(plans(testbed, 0)) == (1, 0)
        answers(client, server)


def test_a_deleted_service_keeps_no_flow(testbed: Testbed, watched: Watched) -> None:
    testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[0]))
    with testbed.pod(0) as server, testbed.client_socket(testbed.client, testbed.at.vip) as client:
        answers(client, server)
        present = plans(testbed, 0)
        assert watched.bring(present) == (0, 0)
        testbed.rules()
        assert watched.bring(dict.fromkeys(present)) == (1, 0)
        assert testbed.flows() == []


def test_flows_of_a_node_port_are_deleted_only_on_this_nodes_addresses(
    testbed: Testbed, watched: Watched
) -> None:
    testbed.rules(port=("", NODE_PORT, testbed.at.pods[0]))
    elsewhere = testbed.at.node_inside.replace("254", "77").replace(
        "::fe", "::77"
    )  # an address of another node, reached through this one
    with (
        testbed.pod(0) as first,
        testbed.pod(1) as second,
        testbed.client_socket(testbed.client, testbed.at.node, NODE_PORT) as client,
        testbed.client_socket(testbed.client, testbed.at.node_inside, NODE_PORT) as other,
    ):
        answers(client, first)
        answers(other, first)
        testbed.node.ip(f"neigh replace {elsewhere} lladdr 02:00:00:00:00:77 dev inside")
        with testbed.client_socket(testbed.client, elsewhere, NODE_PORT) as passing:
            passing.send(b"?")
            passes = passing.getsockname()[1]
            assert watched.bring(plans(testbed, 0)) == (0, 0)
            testbed.rules(port=("", NODE_PORT, testbed.at.pods[1]))
            assert watched.bring(plans(testbed, 1)) == (2, 0)
            assert [flow.source_port for flow in testbed.flows()] == [passes]
        answers(client, second)


def test_a_flow_that_another_program_translates_stays(testbed: Testbed, watched: Watched) -> None:
    """A published port that is translated to the same pod that the Service loses."""
    own = (testbed.at.vip, DNS, testbed.at.pods[0])
    published = ("", FOREIGN_PORT, testbed.at.pods[0])
    testbed.rules(own=own, published=published)
    with (
        testbed.pod(0) as server,
        testbed.client_socket(testbed.client, testbed.at.vip) as client,
        testbed.client_socket(testbed.client, testbed.at.node, FOREIGN_PORT) as foreign,
    ):
        answers(client, server)
        answers(foreign, server)
        present = plans(testbed, 0)
        watched.bring(present)
        assert watched.bring(plans(testbed)) == (1, 0)
        answers(client, server)  # the rules still exist, so that there is a flow to delete
        assert watched.bring(dict.fromkeys(present)) == (1, 0)
        (left,) = testbed.flows()
        assert left.destination_port == FOREIGN_PORT
        answers(foreign, server)


def test_tcp_flows_are_never_deleted(testbed: Testbed, watched: Watched) -> None:
    testbed.rules(dns=(testbed.at.vip, DNS, testbed.at.pods[0]))
    with testbed.pods.entered():
        listening = socket.create_server((testbed.at.pods[0], TARGET), family=testbed.at.number)
    with listening:
        with testbed.client.entered():
            client = socket.create_connection((testbed.at.vip, DNS), timeout=PATIENCE)
        with client, listening.accept()[0] as served:
            both = plans(testbed, 0) | plans(testbed, 0, protocol=TCP)
            watched.bring(both)
            watched.bring(plans(testbed, 1) | plans(testbed, 1, protocol=TCP))
            watched.bring(dict.fromkeys(both))
            (flow,) = testbed.flows(TCP)
            assert flow.is_dnated
            client.sendall(b"?")
            served.settimeout(PATIENCE)
            assert served.recv(1) == b"?"


def test_a_restart_deletes_only_flows_of_removed_frontends(testbed: Testbed, watched: Watched) -> None:
    vip, previous = testbed.at.vip, testbed.at.vip.removesuffix("3") + "9"
    testbed.rules(dns=(vip, DNS, testbed.at.pods[0]), previous=(previous, DNS, testbed.at.pods[0]))
    with (
        testbed.pod(0) as server,
        testbed.client_socket(testbed.client, vip) as client,
        testbed.client_socket(testbed.client, previous) as late,
    ):
        answers(client, server)
        answers(late, server)
        (stays,) = [flow for flow in testbed.flows() if flow.destination == parse_address(vip)]
        testbed.rules(dns=(vip, DNS, testbed.at.pods[0]))
        watched.stale.inherit([Frontend(parse_address(each), DNS, UDP) for each in (vip, previous)])
        assert watched.bring(plans(testbed, 0)) == (1, 0)
        assert testbed.flows() == [stays]
        answers(client, server)


def track(testbed: Testbed, clients: range, pod: str) -> None:
    """Create by netlink a conntrack entry for each of these clients to the Service, with that pod."""
    network = parse_address(testbed.at.client)[:12]
    to, answering = (parse_address(testbed.at.vip), DNS), (parse_address(pod), TARGET)
    head = conntrack.HEAD.pack(testbed.at.number, 0, 0)
    # CTA_STATUS: reply seen, assured, confirmed. 7 is CTA_TIMEOUT.
    tail = netlink.attribute(conntrack.CTA_STATUS, (0x0E).to_bytes(4))
    tail += netlink.attribute(7, (600).to_bytes(4))
    requests = []
    for number in clients:
        client = Address(network + number.to_bytes(4)), 4000
        original = conntrack.tuple_attribute(conntrack.CTA_TUPLE_ORIG, UDP, client, to)
        reply = conntrack.tuple_attribute(conntrack.CTA_TUPLE_REPLY, UDP, answering, client)
        requests.append(netlink.message(conntrack.NEW, _CREATE, 1, head + original + reply + tail))
    with (
        testbed.node.entered(),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, conntrack.NETLINK_NETFILTER) as sock,
    ):
        for first in range(0, len(requests), 200):
            sock.sendto(b"".join(requests[first : first + 200]), (0, 0))
        with pytest.raises(BlockingIOError):  # the kernel rejected none
            sock.recv(1 << 16, socket.MSG_DONTWAIT)


_CREATE = netlink.NLM_F_REQUEST | netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
_EACH = 25_000


@pytest.mark.long
def test_twenty_five_thousand_stale_flows_are_ended_beside_as_many_others(
    testbed: Testbed, watched: Watched
) -> None:
    if int(sysctl.read("net/netfilter/nf_conntrack_max")) < 4 * _EACH:
        pytest.skip("the table of this machine's kernel is too small")
    for pod, clients in enumerate((range(1, _EACH + 1), range(_EACH + 1, 2 * _EACH + 1))):
        track(testbed, clients, testbed.at.pods[pod])
    assert watched.bring(plans(testbed, 0, 1)) == (0, 0)
    assert watched.bring(plans(testbed, 1)) == (_EACH, 0)
    left = testbed.flows()
    assert len(left) == _EACH
    assert {flow.reply_source for flow in left} == {parse_address(testbed.at.pods[1])}
