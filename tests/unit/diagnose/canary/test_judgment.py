"""What a connection proves."""

from collections.abc import Mapping

import pytest

from ebpfproxy.diagnose.canary.judgment import tried
from ebpfproxy.diagnose.canary.result import Locate, Outcome, Result, State
from ebpfproxy.diagnose.explain.origin import Origin
from ebpfproxy.diagnose.explain.result import Destination
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.model.address import Address, Protocol, parse_address
from ebpfproxy.model.connection import Translation
from tests.support.build import endpoint, port, service, slice_of
from tests.unit.diagnose.explain.scene import (
    A_CLIENT,
    CLUSTER_IP,
    THE_NODE,
    explained,
    situation,
    slice_with,
    to,
)

REFUSED = "Connection refused"
ENDPOINTS = (parse_address("10.1.0.1"), 8080), (parse_address("10.1.0.2"), 8080)
FRONTEND = parse_address(CLUSTER_IP), 80
WEB = (service(), slice_of("web", endpoint("10.1.0.1"), endpoint("10.1.0.2")))


class Client:
    """A client with a known outcome by destination. Others get no reply."""

    def __init__(
        self, outcomes: Mapping[tuple[Address, int], Outcome | KernelError], origin: Origin = THE_NODE
    ) -> None:
        self.origin = origin
        self.tried: list[Destination] = []
        self._outcomes = outcomes

    def attempt(self, destination: Destination, locate: Locate) -> Outcome:
        self.tried.append(destination)
        found = self._outcomes.get((destination.address, destination.port), Outcome("no reply"))
        if isinstance(found, KernelError):
            raise found
        return found


def judged(
    of: Situation,
    frontend: Outcome | KernelError,
    endpoints: Mapping[tuple[Address, int], Outcome] | None = None,
    *,
    origin: Origin = THE_NODE,
    protocol: Protocol = Protocol.TCP,
) -> Result:
    client = Client({FRONTEND: frontend, **(endpoints or {})}, origin)
    return tried(client, explained(of, to(protocol=protocol), origin), lambda connection: None)


def by_socket(index: int = 0) -> Translation:
    return Translation(ENDPOINTS[index], by_socket=True)


def test_a_connection_to_a_planned_endpoint_proves_the_path() -> None:
    found = judged(situation(*WEB), Outcome("", FRONTEND, by_socket()))
    assert found.state is State.WORKS
    assert str(found) == (
        "canary node -> 10.96.0.10:80/TCP, hook connect4: works: default/web, endpoint 10.1.0.1:8080"
    )


@pytest.mark.parametrize(
    ("outcome", "detail"),
    [
        (Outcome("", FRONTEND), "does not translate the connection, and something else answers"),
        (
            Outcome("", FRONTEND, Translation((parse_address("10.1.0.3"), 8080), by_socket=True)),
            "the plan does not use this endpoint",
        ),
        (Outcome("", FRONTEND, Translation(ENDPOINTS[0])), "by the packet path instead"),
        (Outcome("", ENDPOINTS[0], by_socket()), "the client has 10.1.0.1:8080 as its peer"),
    ],
)
def test_a_connection_that_is_not_as_planned_fails(outcome: Outcome, detail: str) -> None:
    found = judged(situation(*WEB), outcome)
    assert found.state is State.FAILS
    assert detail in found.detail


def test_a_refused_connection_fails_if_its_endpoint_answers_without_the_service() -> None:
    answering = {ENDPOINTS[0]: Outcome("", ENDPOINTS[0])}
    found = judged(situation(*WEB), Outcome(REFUSED, None, by_socket()), answering)
    assert (found.state, found.endpoint) == (State.FAILS, "10.1.0.1:8080")
    assert found.detail == "Connection refused; 10.1.0.1:8080 answers without the Service"


def test_another_endpoint_that_answers_proves_nothing() -> None:
    answering = {ENDPOINTS[1]: Outcome("", ENDPOINTS[1])}
    found = judged(situation(*WEB), Outcome(REFUSED, None, by_socket()), answering)
    assert found.state is State.UNPROVEN


def test_without_a_translation_any_endpoint_that_answers_is_a_proof_of_failure() -> None:
    answering = {ENDPOINTS[1]: Outcome("", ENDPOINTS[1])}
    assert judged(situation(*WEB), Outcome("no reply"), answering).state is State.FAILS
    assert judged(situation(*WEB), Outcome("no reply")).state is State.UNPROVEN


def test_a_machine_that_cannot_make_the_connection_proves_nothing() -> None:
    found = judged(situation(*WEB), Rejected("eth0 is no Ethernet device"))
    assert found.state is State.UNPROVEN
    assert "eth0 is no Ethernet device" in found.detail


def test_the_packet_path_is_expected_where_no_hook_is() -> None:
    of = situation(*WEB, mode="nftables")
    assert judged(of, Outcome("", FRONTEND, Translation(ENDPOINTS[0]))).state is State.WORKS
    assert judged(situation(*WEB), Outcome("", FRONTEND, by_socket()), origin=A_CLIENT).state is State.FAILS


def test_udp_without_an_answer_works_if_it_is_translated() -> None:
    web = service("web", port(80, protocol=Protocol.UDP))
    of = situation(web, slice_with(Protocol.UDP, 8080, endpoint("10.1.0.1")))
    outcome = Outcome("", FRONTEND, by_socket())
    assert judged(of, outcome, protocol=Protocol.UDP).state is State.WORKS
    assert judged(of, Outcome(REFUSED), protocol=Protocol.UDP).state is State.FAILS
    closed = Outcome(REFUSED, None, by_socket())
    assert judged(of, closed, protocol=Protocol.UDP).state is State.UNPROVEN


def test_sctp_is_not_tried() -> None:
    web = service("web", port(80, protocol=Protocol.SCTP))
    of = situation(web, slice_with(Protocol.SCTP, 80, endpoint("10.1.0.1")))
    client = Client({})
    found = tried(client, explained(of, to(protocol=Protocol.SCTP), THE_NODE), lambda connection: None)
    assert found.state is State.UNPROVEN
    assert not client.tried
