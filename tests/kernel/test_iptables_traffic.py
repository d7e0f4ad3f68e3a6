"""Real connections through the iptables backend, with both tool backends."""

import threading
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.iptables import cleanup
from ebpfproxy.lab import Lab, Pod, sockets
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.model.service import Service, ServiceType
from ebpfproxy.plan.service_plan import ServicePortPlan
from tests.kernel.iptables_testbed import TARGET, TOOL_BACKENDS, Testbed, endpoints, on_node
from tests.support.build import HERE, endpoint, port, service, slice_of

pytestmark = pytest.mark.kernel

TCP, UDP = Protocol.TCP, Protocol.UDP
VIP, VIP6, NODE_PORT = "10.96.0.10", "fd00:96::10", 30080
PATIENCE = 30.0


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("test-iptables", 90) as made:
        for name in ("one", "two"):
            pod = made.pod(name)
            for protocol in (TCP, UDP):
                pod.serve_echo(protocol, TARGET)
        yield made


@pytest.fixture(params=TOOL_BACKENDS)
def testbed(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Testbed]:
    with on_node(lab, request.param) as made:
        yield made


def web(*ips: str, node_port: int = 0) -> Service:
    type_ = ServiceType.NODE_PORT if node_port else ServiceType.CLUSTER_IP
    return service("web", port(80, node_port=node_port), ips=ips or (VIP,), type_=type_)


def plans_of_web(testbed: Testbed, *pods: Pod) -> tuple[ServicePortPlan, ...]:
    """The plans of the Service web with these endpoints."""
    return testbed.plans(web(), endpoints("web", *(pod.v4 for pod in pods)))


def answer(client: Pod, address: str, number: int = 80, protocol: Protocol = TCP) -> list[str]:
    """The name of the server that answers, and the client address that it sees."""
    return client.ask(protocol, address, number, PATIENCE).split()


def test_a_cluster_ip_reaches_its_endpoint_with_the_clients_address(lab: Lab, testbed: Testbed) -> None:
    one, two = lab.pods["one"], lab.pods["two"]
    plans = testbed.plans(web(VIP, VIP6), endpoints("web", one.v4), endpoints("web", one.v6))
    dns = service("dns", port(53, protocol=UDP), ips=("10.96.0.53",))
    names = slice_of("dns", endpoint(one.v4, HERE), ports=(EndpointPort("", UDP, TARGET),))
    assert not testbed.bring(testbed.wanted(plans, testbed.plans(dns, names)))
    assert answer(two, VIP) == ["one", two.v4]
    assert answer(two, VIP6) == ["one", two.v6]
    assert answer(two, "10.96.0.53", 53, UDP) == ["one", two.v4]


def test_a_node_port_answers_external_clients_and_the_node_itself(lab: Lab, testbed: Testbed) -> None:
    one = lab.pods["one"]
    both = web(VIP, VIP6, node_port=NODE_PORT)
    plans = testbed.plans(both, endpoints("web", one.v4), endpoints("web", one.v6))
    assert not testbed.bring(testbed.wanted(plans))
    inside = lab.addresses.gateway(0)
    assert answer(lab.outside, lab.node.v4, NODE_PORT) == ["one", inside.v4]
    assert answer(lab.outside, lab.node.v6, NODE_PORT) == ["one", inside.v6]
    assert answer(lab.node, lab.node.v4, NODE_PORT)[0] == "one"


def test_a_pod_that_connects_to_itself_is_masqueraded(lab: Lab, testbed: Testbed) -> None:
    one = lab.pods["one"]
    assert not testbed.bring(testbed.wanted(plans_of_web(testbed, one)))
    assert answer(one, VIP) == ["one", lab.addresses.gateway(0).v4]


def test_connections_are_refused_while_a_service_has_no_endpoint(lab: Lab, testbed: Testbed) -> None:
    one, two = lab.pods["one"], lab.pods["two"]
    for _ in range(2):
        assert not testbed.bring(testbed.wanted(plans_of_web(testbed)))
        with pytest.raises(ConnectionRefusedError):
            answer(two, VIP)
        assert not testbed.bring(testbed.wanted(plans_of_web(testbed, one)))
        assert answer(two, VIP)[0] == "one"


PAUSE = 0.002
"""Seconds between connections. The changes take a minute on a busy machine; without a pause a client would
use all of its ports in that time."""


def test_no_connection_fails_while_endpoints_change(lab: Lab, testbed: Testbed) -> None:
    """No packet sees an incomplete Service."""
    one, two = lab.pods["one"], lab.pods["two"]
    assert not testbed.bring(testbed.wanted(plans_of_web(testbed, one)))
    over, answers = threading.Event(), []

    def dial() -> None:
        with netns.entered(lab.outside.netns):
            while not over.wait(PAUSE):
                answers.append(sockets.ask(TCP, VIP, 80, PATIENCE).split()[0])

    failed: list[OSError] = []

    def client() -> None:
        try:
            dial()
        except OSError as failure:
            failed.append(failure)

    thread = threading.Thread(target=client)
    thread.start()
    try:
        for _ in range(10):
            for pods in ((two,), (one, two), (one,)):
                assert not testbed.bring(testbed.wanted(plans_of_web(testbed, *pods)))
    finally:
        over.set()
        thread.join(PATIENCE)
    assert not failed
    assert set(answers) == {"one", "two"}


def test_open_connections_survive_the_removal_of_all_rules(lab: Lab, testbed: Testbed) -> None:
    one, two = lab.pods["one"], lab.pods["two"]
    assert not testbed.bring(
        testbed.wanted(testbed.plans(web(node_port=NODE_PORT), endpoints("web", one.v4)))
    )
    with netns.entered(two.netns):
        inside = sockets.dial(TCP, VIP, 80, PATIENCE)
    with netns.entered(lab.outside.netns):
        outside = sockets.dial(TCP, lab.node.v4, NODE_PORT, PATIENCE)
    with inside, outside:
        assert cleanup.remove()
        for client in (inside, outside):
            client.sendall(b"still there")
            assert client.recv(64) == b"still there"
    with pytest.raises(ConnectionRefusedError):  # no process listens on the node
        answer(lab.outside, lab.node.v4, NODE_PORT)


def test_rules_of_a_previous_run_serve_during_the_takeover(lab: Lab, testbed: Testbed) -> None:
    one, two = lab.pods["one"], lab.pods["two"]
    wanted = testbed.wanted(plans_of_web(testbed, one))
    assert not testbed.bring(wanted)
    with netns.entered(two.netns):
        client = sockets.dial(TCP, VIP, 80, PATIENCE)
    with client:
        testbed.plane.close()
        testbed.plane = testbed.another_run()
        assert testbed.plane.read() == wanted
        assert answer(two, VIP)[0] == "one"
        assert not testbed.bring(wanted)
        client.sendall(b"still there")
        assert client.recv(64) == b"still there"
