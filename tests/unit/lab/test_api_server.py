"""The lab's API server, as the agent's own source sees it."""

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.api.event import ENDPOINT_SLICE, NODE, SERVICE, Event, ServiceChanged, SliceChanged, Synced
from ebpfproxy.api.watch import ApiSource, load_configuration
from ebpfproxy.lab import api_server, manifests
from ebpfproxy.lab.api_server import ApiServer
from ebpfproxy.model.address import parse_address

SOON = 20.0
NODE_NAME = "node-1"


class Source:
    """An agent's source with this server, and its events."""

    def __init__(self, server: ApiServer) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._stop = threading.Event()
        configuration = load_configuration("", f"http://127.0.0.1:{server.server_address[1]}")
        source = ApiSource(configuration, NODE_NAME, self._put)
        self._thread = threading.Thread(target=source.run, args=(self._stop,), daemon=True)
        self._thread.start()

    def _put(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def until(self, *events: Event) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: all(e in self.events for e in events), SOON), self.events

    def changes(self, name: str) -> list[Event]:
        return [
            event
            for event in self.events
            if isinstance(event, ServiceChanged | SliceChanged) and event.name.name.startswith(name)
        ]

    def end(self) -> None:
        self._stop.set()
        self._thread.join(SOON)
        assert not self._thread.is_alive()


def service(name: str, address: str) -> manifests.Object:
    return manifests.service(name, [address], [manifests.port(80)])


@pytest.fixture
def server() -> Iterator[ApiServer]:
    objects = [service("web", "10.96.0.10"), manifests.node(NODE_NAME)]
    with ApiServer(("127.0.0.1", 0), objects) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def source(server: ApiServer) -> Iterator[Source]:
    source = Source(server)
    yield source
    source.end()


def test_objects_are_listed_by_a_stream_and_written_ones_are_watched(
    server: ApiServer, source: Source
) -> None:
    source.until(Synced(SERVICE), Synced(ENDPOINT_SLICE), Synced(NODE))
    assert len(source.changes("web")) == 1
    with contextlib.closing(api_server.connected("127.0.0.1", server.server_address[1])) as connection:
        api_server.put(connection, service("late", "10.96.0.11"))
        api_server.put(connection, manifests.endpoint_slice("late-1", "late", ["10.244.0.1"], []))
        api_server.put(connection, service("late", "10.96.0.12"))
    with source._changed:
        assert source._changed.wait_for(lambda: len(source.changes("late")) == 3, SOON)
    assert len(source.changes("web")) == 1


def test_a_second_agent_sees_the_written_objects(server: ApiServer) -> None:
    with contextlib.closing(api_server.connected("127.0.0.1", server.server_address[1])) as connection:
        api_server.put(connection, service("web", "10.96.0.99"))
    second = Source(server)
    second.until(Synced(SERVICE))
    (change,) = second.changes("web")
    second.end()
    assert isinstance(change, ServiceChanged)
    assert change.service
    assert parse_address("10.96.0.99") in change.service.cluster_ips


def lines(server: ApiServer, path: str, count: int) -> list[dict[str, Any]]:
    """The first events of a watch."""
    with contextlib.closing(api_server.connected("127.0.0.1", server.server_address[1])) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return [json.loads(answer.readline()) for _ in range(count)]


def answered(server: ApiServer, path: str) -> tuple[int, dict[str, Any]]:
    with contextlib.closing(api_server.connected("127.0.0.1", server.server_address[1])) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_a_watch_continues_from_a_listed_version_without_the_objects_before(server: ApiServer) -> None:
    """As kube-proxy does, which lists and then watches."""
    _, listed = answered(server, "/api/v1/services?limit=500&resourceVersion=0")
    version = listed["metadata"]["resourceVersion"]
    with contextlib.closing(api_server.connected("127.0.0.1", server.server_address[1])) as connection:
        for address in ("10.96.0.11", "10.96.0.12"):
            api_server.put(connection, service("late", address))
    path = f"/api/v1/services?watch=true&resourceVersion={version}"
    seen = [(each["type"], each["object"]["spec"]["clusterIP"]) for each in lines(server, path, 2)]
    assert seen == [("ADDED", "10.96.0.11"), ("MODIFIED", "10.96.0.12")]


def test_a_watch_from_before_the_history_expires(server: ApiServer) -> None:
    status, failure = answered(server, "/api/v1/services?watch=true&resourceVersion=1")
    assert (status, failure["reason"]) == (410, "Expired")


def test_a_single_node_is_returned_and_a_missing_one_is_not_found(server: ApiServer) -> None:
    status, node = answered(server, f"/api/v1/nodes/{NODE_NAME}")
    assert (status, node["metadata"]["name"]) == (200, NODE_NAME)
    for path in ("/api/v1/nodes/other", "/api/v1/pods", "/"):
        status, failure = answered(server, path)
        assert (status, failure["reason"]) == (404, "NotFound")
