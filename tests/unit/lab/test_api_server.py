"""The lab's API server, as the agent's own source sees it."""

import contextlib
import threading
from collections.abc import Iterator

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
