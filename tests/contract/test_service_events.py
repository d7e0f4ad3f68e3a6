"""Warning Events of Services at an API server, for annotations beyond a bound and addresses that are not
served.
"""

import json
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ebpfproxy.agent.protected_claims import RejectedClaim
from ebpfproxy.agent.service_events import NOT_CREATED, NOT_SERVED, REASON, ServiceEvents
from ebpfproxy.api.connection import Timing
from ebpfproxy.api.event import Event, ServiceChanged
from ebpfproxy.api.parse import parse_service
from ebpfproxy.api.watch import Access, ApiSource, load_configuration
from ebpfproxy.model.address import Protocol, parse_address
from ebpfproxy.model.balancing import MAX_RULES
from ebpfproxy.plan.protected_addresses import Protected
from ebpfproxy.plan.service_plan import Frontend
from tests.kernel.cluster import eventually
from tests.support.apiserver import ApiServer, make_service


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


@pytest.fixture
def access(server: ApiServer, tmp_path: pathlib.Path) -> Access:
    path = tmp_path / "kubeconfig"
    server.write_kubeconfig(path)
    return load_configuration(str(path), "", Timing(retry_first=0.01, retry_last=0.02))


@pytest.fixture
def agent(access: Access) -> Iterator[Callable[[], threading.Event]]:
    """Starts what an agent does with Services, in threads. Returns what is set after each of them."""
    stop = threading.Event()

    def start() -> threading.Event:
        events, seen = ServiceEvents("node", access.session, pause=0.01), threading.Event()

        def put(event: Event) -> None:
            if isinstance(event, ServiceChanged):
                events.seen(event)
                seen.set()

        source = ApiSource(access, "node", put)
        for run in (source.run, events.run):
            threading.Thread(target=run, args=(stop,), daemon=True).start()
        return seen

    yield start
    stop.set()


def posts(server: ApiServer) -> int:
    """The number of requests that created Events, or tried to."""
    return sum(each.method == "POST" for each in server.requests)


def weighted(name: str, rules: int, uid: str = "a-1") -> dict[str, Any]:
    """A Service with this number of weight rules."""
    made = make_service(name, namespace="shop")
    text = ",".join(f"10.{n >> 8}.{n & 255}.1=1" for n in range(rules))
    made["metadata"] |= {"uid": uid, "annotations": {"ebpfproxy/endpoint-weights": text}}
    return made


def test_the_first_agent_creates_one_event_for_each_service(
    server: ApiServer, agent: Callable[[], threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: an annotation beyond the bound was only a line in the log of each agent."""
    server.load([weighted("web", MAX_RULES + 1), weighted("dns", MAX_RULES + 2), weighted("ok", MAX_RULES)])
    for number in (1, 2):
        agent()
        eventually(lambda: posts(server) == 2 * number, "each agent reports both Services")  # noqa: B023
    assert len(server.events) == 2
    (event,) = (each for each in server.events if each["regarding"]["name"] == "web")
    assert (event["type"], event["reason"], event["metadata"]["namespace"]) == ("Warning", REASON, "shop")
    what = "annotation ebpfproxy/endpoint-weights is ignored"
    assert event["note"] == f"{what}: there are more than {MAX_RULES} rules"
    regarding = {"kind": "Service", "namespace": "shop", "name": "web", "uid": "a-1"}
    assert event["regarding"] == regarding
    assert not [each for each in caplog.records if each.getMessage() == NOT_CREATED]


def test_a_change_of_the_service_causes_no_second_event_but_another_service_does(
    server: ApiServer, agent: Callable[[], threading.Event]
) -> None:
    server.put(weighted("web", MAX_RULES + 1))
    seen = agent()
    eventually(lambda: posts(server) == 1, "the Event")
    for rules in (MAX_RULES, MAX_RULES + 5):
        seen.clear()
        server.put(weighted("web", rules))
        assert seen.wait(20)
    server.delete("Service", "shop", "web")
    server.put(weighted("web", MAX_RULES + 1, uid="b-2"))
    eventually(lambda: len(server.events) == 2, "the Event of the new Service")
    assert posts(server) == 2
    assert [each["regarding"]["uid"] for each in server.events] == ["a-1", "b-2"]


def test_rejected_events_are_one_line(
    server: ApiServer, agent: Callable[[], threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    server.fail(10, 403, match=lambda request: request.method == "POST")
    server.load([weighted(f"web-{number}", MAX_RULES + 1) for number in range(3)])
    agent()
    eventually(lambda: posts(server) == 3, "all are tried")
    assert [each.getMessage() for each in caplog.records].count(NOT_CREATED) == 1


def test_a_tenant_with_many_services_fills_no_memory(access: Access) -> None:
    """Those beyond the queue are left out; nothing waits."""
    events = ServiceEvents("node", access.session)
    for number in range(1000):
        changed = parse_service(json.dumps(weighted(f"web-{number}", MAX_RULES + 1)).encode())
        assert isinstance(changed, ServiceChanged)
        events.seen(changed)
    assert events._waiting.qsize() == 100


def test_an_address_that_is_not_served_is_an_event_of_its_service(server: ApiServer, access: Access) -> None:
    """The first of several agents creates it."""
    made = make_service("web", namespace="shop")
    made["metadata"] |= {"uid": "a-1"}
    made["spec"] |= {"externalIPs": ["198.51.100.7"]}
    changed = parse_service(json.dumps(made).encode())
    assert isinstance(changed, ServiceChanged)
    frontend = Frontend(parse_address("198.51.100.7"), 443, Protocol.TCP)
    stop = threading.Event()
    for number in (1, 2):
        events = ServiceEvents(f"node-{number}", access.session, pause=0.01)
        threading.Thread(target=events.run, args=(stop,), daemon=True).start()
        events.seen(changed)
        for _ in range(2):
            events.rejected(RejectedClaim(changed.name, frontend, Protected.OUTSIDE_NETWORKS))
        eventually(lambda: posts(server) == number, "an attempt of each agent")  # noqa: B023
    (event,) = server.events
    stop.set()
    assert (event["type"], event["reason"], event["regarding"]["uid"]) == ("Warning", NOT_SERVED, "a-1")
    meaning = Protected.OUTSIDE_NETWORKS.meaning
    assert event["note"] == f"198.51.100.7:443/TCP is not served: {meaning}"
