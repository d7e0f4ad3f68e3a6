"""Flows of external clients while Services change, and while the agent is killed or restarted."""

import contextlib
from collections.abc import Iterator

import pytest

from ebpfproxy.bench.load import Load
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, connected, converse, outcome, outcomes, rejection
from tests.kernel.cluster import eventually, terminating
from tests.kernel.differences import DIFFERENCES
from tests.kernel.two_nodes import TwoNodes, name_and_client

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])


def name_of(answer: str) -> str:
    return name_and_client(answer)[0]


@both_families
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
def test_without_endpoints_an_external_client_is_rejected_at_once(
    two_nodes: TwoNodes, family: str, protocol: Protocol
) -> None:
    web = two_nodes.everywhere().to()
    answer, sent_again = rejection(two_nodes.x, protocol, *web.frontend("NodePort", family, protocol))
    assert answer == REFUSED
    assert sent_again <= DIFFERENCES[two_nodes.mode].most_retransmissions()


@both_families
def test_a_udp_flow_moves_to_another_endpoint_when_its_endpoint_is_removed(
    two_nodes: TwoNodes, family: str
) -> None:
    web = two_nodes.everywhere().to(two_nodes.a)
    with connected(two_nodes.x, UDP, getattr(two_nodes.node, family), web.node_port) as sock:
        for pod in (two_nodes.a, two_nodes.d, two_nodes.b):
            web.to(pod)
            DIFFERENCES[two_nodes.mode].await_flow(lambda: name_of(converse(sock)), pod.name)


@both_families
@pytest.mark.parametrize("place", ["here", "there"])
def test_a_tcp_connection_survives_the_removal_of_its_endpoint(
    two_nodes: TwoNodes, family: str, place: str
) -> None:
    pod = two_nodes.a if place == "here" else two_nodes.d
    web = two_nodes.everywhere().to(pod)
    address = getattr(two_nodes.node, family)
    with connected(two_nodes.x, TCP, address, web.node_port) as sock:
        assert name_of(converse(sock)) == pod.name
        web.to(two_nodes.b)
        assert name_of(converse(sock)) == pod.name
        assert name_of(outcome(two_nodes.x, TCP, address, web.node_port)) == "b"
        two_nodes.write(web.name)
        if not DIFFERENCES[two_nodes.mode].ends_with_service:
            assert name_of(converse(sock)) == pod.name


def test_a_new_connection_from_a_reused_port_selects_an_endpoint_again(two_nodes: TwoNodes) -> None:
    """The previous connection has ended, so neither its endpoint nor the removal of that endpoint matters."""
    web = two_nodes.everywhere().to(two_nodes.a)
    source = (two_nodes.x.v4, 33333)
    for pod in (two_nodes.a, two_nodes.d, two_nodes.b):
        web.to(pod)
        dial = web.dial("NodePort", "v4", TCP)._replace(source=source)
        (answer,) = outcomes(two_nodes.x, [dial])
        assert name_of(answer) == pod.name


def test_a_terminating_endpoint_serves_external_clients_if_there_is_no_other(two_nodes: TwoNodes) -> None:
    web = two_nodes.everywhere(externalTrafficPolicy="Local").to(terminating(two_nodes.a))
    assert name_of(outcome(two_nodes.x, TCP, two_nodes.node.v4, web.node_port)) == "a"
    web.to(terminating(two_nodes.a), two_nodes.b)
    found = {name_of(outcome(two_nodes.x, TCP, two_nodes.node.v4, web.node_port)) for _ in range(10)}
    assert found == {"b"}
    web.to(terminating(two_nodes.a, serving=False))
    assert outcome(two_nodes.x, TCP, two_nodes.node.v4, web.node_port, 0.3) in (REFUSED, SILENT)


@contextlib.contextmanager
def steady_load(pair: TwoNodes, load: Load, *ports: int) -> Iterator[None]:
    """Within the block external clients open connections and use existing ones. None of them may fail."""
    addresses = (pair.node.v4, pair.node.v6)
    targets = load.targets("outside", [(address, port) for address in addresses for port in ports])
    with contextlib.ExitStack() as stack:
        old = [
            stack.enter_context(connected(pair.x, protocol, address, port))
            for protocol in (TCP, UDP)
            for address in addresses
            for port in ports
        ]
        answers = [converse(sock) for sock in old]
        running = load.start_churn(pair.x, targets)
        try:
            yield
        except BaseException:
            running.kill()
            raise
        assert [converse(sock) for sock in old] == answers
    report = load.end_churn(running)
    assert (report["failed"], report["errors"]) == (0, {})
    assert report["attempts"] > 20  # there was a load; its rate depends on the machine


@pytest.mark.same_for("two_nodes")  # of mode ebpf
@pytest.mark.ways("ebpf-on", "ebpf-off")
def test_a_crash_and_a_restart_fail_no_external_connection(two_nodes: TwoNodes, load: Load) -> None:
    here, there = two_nodes.everywhere().to(two_nodes.a), two_nodes.everywhere().to(two_nodes.d)
    with steady_load(two_nodes, load, here.node_port, there.node_port):
        for _ in range(3):
            two_nodes.restart()


@pytest.mark.backends("ebpf")
def test_a_restart_with_other_map_sizes_fails_no_external_connection(
    restartable_pair: TwoNodes, load: Load
) -> None:
    """The agent fills new maps, replaces the programs and migrates the flows."""
    restartable_pair.restart()
    here, there = (
        restartable_pair.everywhere().to(restartable_pair.a),
        restartable_pair.everywhere().to(restartable_pair.d),
    )
    previous = {path.name for path in restartable_pair.lab.bpffs.glob("programs-*")}
    with steady_load(restartable_pair, load, here.node_port, there.node_port):
        restartable_pair.restart("--ebpf-services-max=4096", "--ebpf-flows-max=600000")
        eventually(
            lambda: len(list(restartable_pair.lab.bpffs.glob("programs-*"))) == 1,
            "the previous programs are removed",
        )
    assert {path.name for path in restartable_pair.lab.bpffs.glob("programs-*")}.isdisjoint(previous)
