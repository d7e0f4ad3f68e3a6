"""Direct server return at an API server: Nodes are watched as peers, and the own Node is annotated."""

import contextlib
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ebpfproxy.agent.announcer import ANNOUNCED, NOT_ANNOUNCED, NOT_WITHDRAWN, WITHDRAWN, Announcer, withdraw
from ebpfproxy.api import announcement
from ebpfproxy.api.connection import Timing
from ebpfproxy.api.event import PEER_NODE, SERVICE_CIDR, Event, NodeChanged, PeerChanged, Synced
from ebpfproxy.api.watch import Access, ApiSource, Session, load_configuration
from ebpfproxy.config import Config
from ebpfproxy.errors import SourceError
from ebpfproxy.linux.netlink import geneve
from ebpfproxy.model.address import parse_address
from ebpfproxy.model.node import Node, PeerNode
from tests.support.apiserver import ApiServer, make_node

SOON = 20
OWN, OTHER = "node-1", "node-2"
ANNOTATION = "ebpfproxy/dsr-port"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        running.load([make_node(OWN), make_node(OTHER)])
        yield running


@pytest.fixture
def access(server: ApiServer, tmp_path: pathlib.Path) -> Access:
    path = tmp_path / "kubeconfig"
    server.write_kubeconfig(path)
    return load_configuration(str(path), "", Timing(retry_first=0.01, retry_last=0.02))


class Watched:
    """The events of an ApiSource that watches all Nodes. `own` gets those of the Node of the agent."""

    def __init__(self, access: Access, own: Callable[[Node | None], object] = lambda node: None) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._own = own
        self._stop = threading.Event()
        source = ApiSource(access, OWN, self._put, peers=True)
        self._thread = threading.Thread(target=source.run, args=(self._stop,))
        self._thread.start()

    def _put(self, event: Event) -> None:
        if isinstance(event, NodeChanged):
            self._own(event.node)
        self.events.put(event)

    def until(self, wanted: Event) -> list[Event]:
        """Return the events about peers up to the one that is wanted."""
        found: list[Event] = []
        while True:
            event = self.events.get(timeout=SOON)
            if isinstance(event, PeerChanged):
                found.append(event)
            if event == wanted:
                return found

    def until_both(self, port: int) -> None:
        """Wait until the watch of the own Node and that of all Nodes have reported the announcement of this
        port. Either of them may be first."""
        missing = {NodeChanged, PeerChanged}
        while missing:
            match self.events.get(timeout=SOON):
                case NodeChanged(node=Node(dsr_port=found)) if found == port:
                    missing.discard(NodeChanged)
                case PeerChanged(name=name, peer=PeerNode(dsr_port=found)) if (name, found) == (OWN, port):
                    missing.discard(PeerChanged)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(SOON)
        assert not self._thread.is_alive()


@pytest.fixture
def watched(access: Access) -> Iterator[Callable[..., Watched]]:
    running: list[Watched] = []

    def start(*arguments: Callable[[Node | None], object]) -> Watched:
        running.append(Watched(access, *arguments))
        return running[-1]

    yield start
    for each in running:
        each.stop()


def peer(server: ApiServer, name: str, port: int = 0) -> PeerChanged:
    addresses = [
        each["address"] for each in make_node(name)["status"]["addresses"] if each["type"] == "InternalIP"
    ]
    return PeerChanged(name, PeerNode(tuple(map(parse_address, addresses)), port))


def test_all_nodes_are_reported_as_peers(server: ApiServer, watched: Callable[..., Watched]) -> None:
    source = watched()
    assert set(source.until(Synced(PEER_NODE))) == {peer(server, OWN), peer(server, OTHER)}
    node = make_node(OTHER)
    node["metadata"]["annotations"] = {ANNOTATION: "6083"}
    server.put(node)
    source.until(peer(server, OTHER, 6083))
    server.delete("Node", "", OTHER)
    source.until(PeerChanged(OTHER, None))


@pytest.mark.parametrize(
    ("node", "options", "further"),
    [
        (OWN, {}, ["Node", SERVICE_CIDR]),
        (OWN, {"peers": True}, ["Node", SERVICE_CIDR, PEER_NODE]),
        (OWN, {"peers": True, "pods": True}, ["Node", SERVICE_CIDR, PEER_NODE, "Pod"]),
        (OWN, {"annotations": True}, ["Node", SERVICE_CIDR, "Pod", "Namespace"]),
        ("", {"peers": True}, [PEER_NODE]),
    ],
    ids=["node", "direct server return", "host ports", "annotations", "edge"],
)
def test_each_kind_is_watched_once(
    access: Access, node: str, options: dict[str, Any], further: list[str]
) -> None:
    source = ApiSource(access, node, lambda event: None, **options)
    assert [each.resource.kind for each in source.reflectors] == ["Service", "EndpointSlice", *further]


def test_an_annotation_is_written_and_removed(server: ApiServer, access: Access) -> None:
    before = dict(server.annotations(OWN))
    with contextlib.closing(access.session()) as session:
        announcement.write(session, OWN, 6083)
        assert server.annotations(OWN) == before | {ANNOTATION: "6083"}
        announcement.write(session, OWN, 0)
        announcement.write(session, OWN, 0)
        announcement.write(session, "no-such-node", 0)
        assert server.annotations(OWN) == before
        with pytest.raises(SourceError, match="not found"):
            announcement.write(session, "no-such-node", 6083)


def announce(access: Access) -> None:
    """Annotate the own Node, as a previous run of the agent did."""
    with contextlib.closing(access.session()) as session:
        announcement.write(session, OWN, 6083)


class Messages:
    """The log messages of the announcer."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level("INFO")

    def until(self, *wanted: str) -> None:
        """Wait until the announcer has logged exactly these messages."""
        deadline = time.monotonic() + SOON
        while self.seen() != list(wanted):
            assert time.monotonic() < deadline, self.seen()
            time.sleep(0.01)

    def seen(self) -> list[str]:
        own = (ANNOUNCED, WITHDRAWN, NOT_ANNOUNCED, NOT_WITHDRAWN)
        return [each.message for each in self._caplog.records if each.message in own]

    def values(self, message: str) -> dict[str, str]:
        (record,) = [each for each in self._caplog.records if each.message == message]
        values: dict[str, str] = record.__dict__["values"]
        return values


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Messages:
    return Messages(caplog)


def test_the_node_announces_what_it_accepts(
    server: ApiServer, access: Access, watched: Callable[..., Watched], messages: Messages
) -> None:
    announcer = Announcer(OWN, access.session)
    source = watched(announcer.seen)
    source.until(Synced(PEER_NODE))
    announcer.accept(6083)
    source.until_both(6083)
    announcer.accept(6083)
    announcer.accept(0)
    source.until_both(0)
    messages.until(ANNOUNCED, WITHDRAWN)
    assert ANNOTATION not in server.annotations(OWN)
    assert sum(each.method == "PATCH" for each in server.requests) == 2


def test_a_node_that_registers_again_announces_again(
    server: ApiServer, access: Access, watched: Callable[..., Watched]
) -> None:
    announcer = Announcer(OWN, access.session)
    announcer.accept(6083)
    source = watched(announcer.seen)
    source.until(peer(server, OWN, 6083))
    server.delete("Node", "", OWN)
    source.until(PeerChanged(OWN, None))
    server.put(make_node(OWN))
    source.until(peer(server, OWN, 6083))


def test_what_a_previous_run_announced_is_withdrawn(
    server: ApiServer, access: Access, watched: Callable[..., Watched], messages: Messages
) -> None:
    announce(access)
    announcer = Announcer(OWN, access.session)
    announcer.accept(0)
    source = watched(announcer.seen)
    source.until(peer(server, OWN, 0))
    messages.until(WITHDRAWN)


def test_a_missing_permission_is_logged_once_with_its_remedy_and_retried(
    server: ApiServer, access: Access, watched: Callable[..., Watched], messages: Messages
) -> None:
    server.fail(5, 403, match=lambda request: request.method == "PATCH")
    announcer = Announcer(OWN, access.session, interval=0.01)
    announcer.accept(6083)
    source = watched(announcer.seen)
    source.until(peer(server, OWN, 6083))
    messages.until(NOT_ANNOUNCED, ANNOUNCED)
    values = messages.values(NOT_ANNOUNCED)
    assert "403" in values["reason"]
    assert "verb patch on nodes" in values["hint"]
    assert f"kubectl annotate node {OWN} {ANNOTATION}=6083" in values["hint"]


def test_after_an_unexpected_error_it_is_retried(
    server: ApiServer, access: Access, watched: Callable[..., Watched], messages: Messages
) -> None:
    """Regression: the thread ended, and no port was announced or withdrawn any more."""
    failures = [RuntimeError("a bug in a library")]

    def session() -> Session:
        if failures:
            raise failures.pop()
        return access.session()

    announcer = Announcer(OWN, session, interval=0.01)
    announcer.accept(6083)
    watched(announcer.seen).until(peer(server, OWN, 6083))
    messages.until(NOT_ANNOUNCED, ANNOUNCED)


def test_a_change_while_it_is_retried_applies_at_once(
    server: ApiServer, access: Access, watched: Callable[..., Watched], messages: Messages
) -> None:
    """The interval of retries is longer than the test."""
    server.fail(1, 500, match=lambda request: request.method == "PATCH")
    announcer = Announcer(OWN, access.session)
    announcer.accept(6083)
    source = watched(announcer.seen)
    messages.until(NOT_ANNOUNCED)
    announcer.accept(6084)
    source.until(peer(server, OWN, 6084))
    messages.until(NOT_ANNOUNCED, ANNOUNCED)


def test_without_an_api_server_the_hint_names_the_manifests(messages: Messages) -> None:
    announcer = Announcer(OWN, None)
    announcer.accept(6083)
    assert messages.seen() == []
    announcer.seen(Node(OWN))
    messages.until(NOT_ANNOUNCED)
    assert "manifests" in messages.values(NOT_ANNOUNCED)["hint"]
    announcer.seen(Node(OWN, dsr_port=6083))  # ends its thread


@pytest.fixture
def with_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node that has the Geneve device, which not every kernel of tests supports."""
    monkeypatch.setattr(geneve, "find", lambda: 7)


def cleanup_config(tmp_path: pathlib.Path, name: str = OWN, **flags: str) -> Config:
    return Config.parse({"kubeconfig": str(tmp_path / "kubeconfig"), "hostname_override": name} | flags)


@pytest.mark.usefixtures("with_device")
def test_cleanup_removes_the_annotation(server: ApiServer, access: Access, tmp_path: pathlib.Path) -> None:
    config = cleanup_config(tmp_path)
    assert withdraw(config, dry_run=False) == []
    announce(access)
    line = f"the annotation {ANNOTATION} of node {OWN}"
    assert withdraw(config, dry_run=True) == [line]
    assert server.annotations(OWN)[ANNOTATION] == "6083"
    assert withdraw(config, dry_run=False) == [line]
    assert ANNOTATION not in server.annotations(OWN)
    assert withdraw(cleanup_config(tmp_path, "no-such-node"), dry_run=False) == []


@pytest.mark.usefixtures("with_device")
def test_cleanup_without_permission_names_the_command(
    server: ApiServer, access: Access, tmp_path: pathlib.Path
) -> None:
    announce(access)
    server.fail(1, 403, match=lambda request: request.method == "PATCH")
    with pytest.raises(SourceError, match="403") as caught:
        withdraw(cleanup_config(tmp_path), dry_run=False)
    assert caught.value.hint == f"run: kubectl annotate node {OWN} {ANNOTATION}-"


def test_cleanup_of_a_node_without_the_device_asks_no_api_server(
    server: ApiServer, tmp_path: pathlib.Path
) -> None:
    assert withdraw(Config.parse({"hostname_override": OWN, "master": server.url}), dry_run=False) == []
    assert server.requests == []
