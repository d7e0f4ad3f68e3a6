"""The API source against a real server: TLS, threads, tokens, dropped connections."""

import contextlib
import dataclasses
import logging
import pathlib
import queue
import threading
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trustme
import yaml

from ebpfproxy.agent.inbox import Inbox, Received
from ebpfproxy.agent.sources import Sources
from ebpfproxy.api.connection import Timing, WatchSilent
from ebpfproxy.api.event import (
    ENDPOINT_SLICE,
    NODE,
    SERVICE,
    SERVICE_CIDR,
    ApiServerReached,
    Event,
    Invalid,
    NodeChanged,
    ServiceChanged,
    ServiceCidrChanged,
    SliceChanged,
    Synced,
)
from ebpfproxy.api.outage import UNREACHABLE, Outage
from ebpfproxy.api.reflector import NO_KIND, UNOBSERVED, Observer
from ebpfproxy.api.watch import ApiSource, load_configuration
from ebpfproxy.config import Config
from ebpfproxy.errors import SourceError
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.model.address import parse_address, parse_network
from tests.support.apiserver import (
    ApiServer,
    Request,
    generate,
    make_endpoint,
    make_node,
    make_service,
    make_slice,
)

KINDS = (SERVICE, ENDPOINT_SLICE, NODE, SERVICE_CIDR)
"""What an agent watches."""

SOON = 20.0
"""Seconds within which something must happen that should happen at once."""

QUICK = Timing(retry_first=0.01, retry_last=0.05, expired=0.2, early=0.01, refresh=0.0, connect=2, answer=5)


class Listener:
    """Records events: the names of existing objects by kind. Its methods wait for states."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.exists: dict[str, set[str]] = {SERVICE: set(), ENDPOINT_SLICE: set(), NODE: set()}
        self._changed = threading.Condition()

    def put(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            match event:
                case ServiceChanged(name=name, service=value):
                    self._note(SERVICE, name.name, value)
                case SliceChanged(name=name, slice=value):
                    self._note(ENDPOINT_SLICE, name.name, value)
                case NodeChanged(node=node):
                    self.exists[NODE] = {node.name} if node else set()
            self._changed.notify_all()

    def _note(self, kind: str, name: str, value: object) -> None:
        if value is None:
            self.exists[kind].discard(name)
        else:
            self.exists[kind].add(name)

    def until(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, SOON), self.events[-20:]

    def until_synced(self, kind: str = SERVICE, times: int = 1) -> None:
        self.until(lambda: self.events.count(Synced(kind)) >= times)

    def until_exists(self, *names: str, kind: str = SERVICE) -> None:
        self.until(lambda: self.exists[kind] == set(names))

    def reset(self) -> None:
        with self._changed:
            self.events.clear()


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)  # the server's state has no event to wait for


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: pathlib.Path) -> str:
    path = tmp_path / "kubeconfig"
    server.write_kubeconfig(path)
    return str(path)


@contextlib.contextmanager
def following(
    kubeconfig: str, master: str = "", timing: Timing = QUICK, observer: Observer = UNOBSERVED
) -> Iterator[Listener]:
    listener, stop = Listener(), threading.Event()
    source = ApiSource(load_configuration(kubeconfig, master, timing), "node-1", listener.put, observer)
    thread = threading.Thread(target=source.run, args=(stop,))
    thread.start()
    try:
        yield listener
    finally:
        stop.set()
        thread.join(SOON)
        assert not thread.is_alive()


def watching(server: ApiServer) -> bool:
    return all(server.watches(kind) == 1 for kind in KINDS)


def watches_from(server: ApiServer, version: int) -> bool:
    """Whether the watches of all kinds began at this version or later. Otherwise they are ended after a
    bookmark, so that the next ones may: once all run, because a watch that ends again and again before its
    first bookmark is taken for a failure and repeated more and more slowly."""
    if not watching(server):
        return False
    last = {request.path: request.query for request in server.requests if request.watch}
    versions = [int(query.get("resourceVersion") or 0) for query in last.values()]
    if len(versions) == len(KINDS) and min(versions) >= version:
        return True
    server.bookmark()
    server.end_watches()
    return False


def settle(server: ApiServer, listener: Listener) -> None:
    """Wait until all kinds are listed and watched."""
    for kind in KINDS:
        listener.until_synced(kind)
    eventually(lambda: watching(server))


def test_existing_objects_and_then_changes_are_reported(server: ApiServer, kubeconfig: str) -> None:
    server.load(
        [make_service("a"), make_slice("a-1", "a", [make_endpoint("10.128.0.1")]), make_node("node-1")]
    )
    with following(kubeconfig) as listener:
        for kind in KINDS:
            listener.until_synced(kind)
        assert listener.exists == {SERVICE: {"a"}, ENDPOINT_SLICE: {"a-1"}, NODE: {"node-1"}}
        server.put(make_service("b"))
        server.delete("Service", "default", "a")
        server.delete("EndpointSlice", "default", "a-1")
        server.delete("Node", "", "node-1")
        listener.until_exists("b")
        listener.until_exists(kind=ENDPOINT_SLICE)
        listener.until_exists(kind=NODE)


def test_only_the_own_node_is_reported_even_if_it_does_not_exist(server: ApiServer, kubeconfig: str) -> None:
    server.put(make_node("node-2"))
    with following(kubeconfig) as listener:
        listener.until_synced(NODE)
        assert [event for event in listener.events if isinstance(event, NodeChanged)] == [NodeChanged(None)]


def test_synced_is_reported_at_the_end_of_the_initial_events(server: ApiServer, kubeconfig: str) -> None:
    """The same for a streaming list that breaks, as in cilium/cilium#26912."""
    server.load(make_service(f"s-{i:04}") for i in range(1234))
    server.break_streams_after = 1000
    with following(kubeconfig) as listener:
        listener.until(lambda: len(listener.exists[SERVICE]) >= 1000)
        server.break_streams_after = None
        listener.until_synced()
        assert len(listener.exists[SERVICE]) == 1234
        at = listener.events.index(Synced(SERVICE))
        assert sum(isinstance(event, ServiceChanged) for event in listener.events[:at]) == 1234


def test_synced_is_reported_after_the_last_page(server: ApiServer, kubeconfig: str) -> None:
    """Regression as in cilium/cilium#26912: after a restart, objects missing from a partial list still
    exist."""
    server.load(make_slice(f"s-{i:04}", "a", [make_endpoint("10.128.0.1")]) for i in range(1234))
    held, release = threading.Event(), threading.Event()

    def hold_the_last_page(request: Request) -> None:
        if request.query.get("continue", "").endswith(".1000"):
            held.set()
            assert release.wait(SOON)

    server.streaming_lists, server.watch_cache = "rejected", False
    server.before = hold_the_last_page
    with following(kubeconfig) as listener:
        assert held.wait(SOON)
        listener.until(lambda: len(listener.exists[ENDPOINT_SLICE]) == 1000)
        assert Synced(ENDPOINT_SLICE) not in listener.events
        release.set()
        listener.until_synced(ENDPOINT_SLICE)
        assert len(listener.exists[ENDPOINT_SLICE]) == 1234


def test_an_expired_continue_token_loses_no_object(server: ApiServer, kubeconfig: str) -> None:
    server.load(make_service(f"s-{i:04}") for i in range(700))

    def expire_once(request: Request) -> None:
        if "continue" in request.query:
            server.expire_continue_tokens()
            server.before = lambda request: None

    server.streaming_lists, server.watch_cache = "rejected", False
    server.before = expire_once
    with following(kubeconfig) as listener:
        listener.until_synced()
        assert len(listener.exists[SERVICE]) == 700


def test_objects_are_added_and_deleted_as_they_match_the_selector(server: ApiServer, kubeconfig: str) -> None:
    other = {"service.kubernetes.io/service-proxy-name": ""}
    server.load([make_service("a"), make_service("b", labels=other), make_slice("s", "a")])
    with following(kubeconfig) as listener:
        settle(server, listener)
        assert listener.exists[SERVICE] == {"a"}
        server.put(make_service("b"))
        listener.until_exists("a", "b")
        server.put(make_service("a", labels=other))
        listener.until_exists("b")
        server.put(make_slice("s", "a", labels={"service.kubernetes.io/headless": "true"}))
        listener.until_exists(kind=ENDPOINT_SLICE)


@pytest.mark.parametrize("streaming", ["served", "rejected"])
@pytest.mark.parametrize("service_fields", [True, False], ids=["1.31", "1.30"])
def test_headless_services_are_not_downloaded_if_the_server_can_select(
    server: ApiServer, kubeconfig: str, service_fields: bool, streaming: str
) -> None:
    """Kubernetes 1.31 has the field selector spec.clusterIP for Services (kubernetes/kubernetes#123905)."""
    server.service_fields, server.streaming_lists = service_fields, streaming
    server.load([make_service("a"), make_service("headless", clusterIP="None")])
    with following(kubeconfig) as listener:
        settle(server, listener)
        assert listener.exists[SERVICE] == {"a"}
        names = {each.name.name for each in listener.events if isinstance(each, ServiceChanged)}
        assert names == ({"a"} if service_fields else {"a", "headless"})
        server.put(make_service("a", clusterIP="None"))
        listener.until_exists()
        server.put(make_service("b"))
        listener.until_exists("b")
    lists = [each for each in server.requests if each.path == "/api/v1/services" and not each.watch]
    assert len(lists) <= 2, "the rejected selector was tried again"


def test_a_slice_with_the_label_of_another_proxy_and_a_service_with_the_headless_label_exist(
    server: ApiServer, kubeconfig: str
) -> None:
    """The selectors of kube-proxy since 1.32: each label counts on one kind only."""
    other, headless = "service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless"
    server.load([make_service("a", labels={headless: ""}), make_slice("s", "a", labels={other: "x"})])
    with following(kubeconfig) as listener:
        settle(server, listener)
        assert listener.exists[SERVICE] == {"a"}
        assert listener.exists[ENDPOINT_SLICE] == {"s"}


def service_cidr(*cidrs: str) -> dict[str, Any]:
    return {"kind": "ServiceCIDR", "metadata": {"name": "kubernetes"}, "spec": {"cidrs": cidrs}}


@pytest.mark.parametrize("status", [404, 403])
def test_a_server_without_service_cidrs_is_asked_again_later_and_logs_it_once(
    server: ApiServer, kubeconfig: str, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """Before Kubernetes 1.33, and with the ClusterRole of earlier versions."""
    caplog.set_level(logging.INFO, "ebpfproxy")
    server.load([make_service("a"), make_node("node-1"), service_cidr("10.96.0.0/16", "fd00::/112")])
    server.fail(7, status, match=lambda request: request.path.endswith("/servicecidrs"))
    with following(kubeconfig, timing=dataclasses.replace(QUICK, lacking=0.05)) as listener:
        for kind in KINDS:
            listener.until_synced(kind)
        listener.until(lambda: any(isinstance(each, ServiceCidrChanged) for each in listener.events))
        (cidr,) = (each for each in listener.events if isinstance(each, ServiceCidrChanged))
        assert cidr == ServiceCidrChanged(
            "kubernetes", (parse_network("10.96.0.0/16"), parse_network("fd00::/112"))
        )
        server.delete("ServiceCIDR", "", "kubernetes")
        listener.until(lambda: ServiceCidrChanged("kubernetes", ()) in listener.events)
    (line,) = [each for each in caplog.records if each.getMessage().startswith(NO_KIND)]
    assert "servicecidrs in the ClusterRole" in str(line.__dict__["values"])
    assert not [each for each in caplog.records if each.getMessage().startswith(UNREACHABLE)]


def test_the_next_watch_starts_at_the_last_bookmark(server: ApiServer, kubeconfig: str) -> None:
    server.put(make_service("a"))
    with following(kubeconfig) as listener:
        settle(server, listener)
        for _ in range(10):
            version = server.put(make_node("node-2"))  # irrelevant to the Services' watch
        server.bookmark()
        server.compact()
        server.end_watches()
        eventually(lambda: watch_of(server, SERVICE, version))
        server.put(make_service("b"))
        listener.until_exists("a", "b")
        assert listener.events.count(Synced(SERVICE)) == 1, "no list was needed"


def watch_of(server: ApiServer, kind: str, version: int) -> list[Request]:
    path = {SERVICE: "/api/v1/services"}[kind]
    return [
        request
        for request in list(server.requests)
        if request.watch and request.path == path and request.query.get("resourceVersion") == str(version)
    ]


@pytest.mark.parametrize("as_status", [False, True])
def test_objects_deleted_while_the_server_was_unreachable_are_deleted_by_the_relist(
    server: ApiServer, kubeconfig: str, as_status: bool
) -> None:
    server.gone_as_status = as_status
    server.load([make_service("a"), make_service("b")])
    with following(kubeconfig) as listener:
        settle(server, listener)
        listener.reset()
        server.stop()
        server.delete("Service", "default", "a")
        server.put(make_service("c"))
        server.put(make_service("d"))
        server.compact()
        server.start()
        listener.until_exists("b", "c", "d")
        listener.until_synced()
        names = [event.name.name for event in listener.events if isinstance(event, ServiceChanged)]
        assert sorted(names) == ["a", "c", "d"], "b has not changed"


def test_after_a_short_outage_the_watch_continues_without_a_list(server: ApiServer, kubeconfig: str) -> None:
    server.load([make_service("a"), make_service("b")])
    with following(kubeconfig) as listener:
        settle(server, listener)
        server.stop()
        server.delete("Service", "default", "a")
        server.put(make_service("c"))
        server.start()
        listener.until_exists("b", "c")
        assert listener.events.count(Synced(SERVICE)) == 1


def test_no_events_are_reported_while_the_server_is_unreachable(
    server: ApiServer, kubeconfig: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.load([make_service("a"), make_node("node-1")])
    with following(kubeconfig) as listener:
        settle(server, listener)
        listener.reset()
        refused = threading.Event()
        server.stop()
        counted = Counter(refused, 20)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Outage, "failed", counted.wrap(Outage.failed))
            assert refused.wait(SOON), "attempts continue"
        assert listener.events == []
        assert listener.exists[SERVICE] == {"a"}
        server.start()
        eventually(lambda: watching(server))
    warnings = [record for record in caplog.records if "fails" in record.getMessage()]
    assert len(warnings) <= 6, "warnings are not logged for each attempt"


class Counter:
    """Sets an event at the n-th call."""

    def __init__(self, reached: threading.Event, target: int) -> None:
        self._reached, self._left = reached, target

    def wrap(self, function: Callable[..., None]) -> Callable[..., None]:
        def counting(*arguments: Any) -> None:
            self._left -= 1
            if self._left <= 0:
                self._reached.set()
            function(*arguments)

        return counting


@pytest.fixture(params=["served", "rejected", "ignored", "failing"])
def lists(request: pytest.FixtureRequest, server: ApiServer) -> str:
    """How the server treats streaming lists."""
    server.streaming_lists = request.param
    return server.streaming_lists


def test_a_server_that_fails_streaming_lists_is_not_unreachable(
    server: ApiServer, kubeconfig: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With etcd 3.4, a server of 1.36 answers 500: RequestWatchProgress is disabled."""
    server.streaming_lists = "failing"
    with caplog.at_level(logging.WARNING), following(kubeconfig) as listener:
        for kind in KINDS:
            listener.until_synced(kind)
    assert UNREACHABLE not in caplog.messages


NEVER_LONG = dataclasses.replace(QUICK, silence=0.3, watch_shortest=20, watch_longest=20)


def test_objects_are_listed_whether_the_server_serves_streaming_lists_or_not(
    server: ApiServer, kubeconfig: str, lists: str
) -> None:
    server.load([make_service("a"), make_service("b"), make_node("node-1")])
    with following(kubeconfig, timing=NEVER_LONG) as listener:
        for kind in KINDS:
            listener.until_synced(kind)
        settle(server, listener)
        server.put(make_service("c"))
        listener.until_exists("a", "b", "c")
        listener.reset()
        server.stop()
        server.delete("Service", "default", "a")
        server.compact()
        server.start()
        listener.until_exists("b", "c")
        listener.until_synced()
        names = [event.name.name for event in listener.events if isinstance(event, ServiceChanged)]
        assert names == ["a"], "the other objects have not changed"
    of_services = [request for request in server.requests if request.path == "/api/v1/services"]
    lists_sent = [request.query for request in of_services if not request.watch]
    assert bool(lists_sent) == (lists != "served")
    versions = [query["resourceVersion"] for query in lists_sent]
    assert versions[:1] in ([], ["0"])
    assert "" not in versions, "no list reads from etcd"
    assert "0" not in versions[1:], "a later list is not older"


def test_a_server_whose_data_was_restored_from_a_backup_is_listed_again(
    server: ApiServer, kubeconfig: str, lists: str
) -> None:
    """Its watch cache accepts a watch of a version that it has not reached, and sends nothing."""
    server.bookmark_every = 0.05
    timing = dataclasses.replace(NEVER_LONG, bookmark_silence=0.3)
    server.load([make_service("a"), make_service("b")])
    with following(kubeconfig, timing=timing) as listener:
        settle(server, listener)
        version = max(server.put(make_node(f"other-{i}")) for i in range(60))
        eventually(lambda: watches_from(server, version))
        listener.reset()
        server.stop()
        server.lose("Service", "default", "a")
        server.rewind(50)
        server.start()
        listener.until_exists("b")


def test_a_connection_that_stays_open_without_bookmarks_is_replaced(
    server: ApiServer, kubeconfig: str
) -> None:
    """A proxy may keep the connection although it has lost the API server."""
    server.bookmark_every = 0.05
    timing = dataclasses.replace(NEVER_LONG, bookmark_silence=0.3)
    with following(kubeconfig, timing=timing) as listener:
        settle(server, listener)
        server.bookmark()
        listener.until_synced()
        asked = len(server.requests)
        time.sleep(0.2)
        assert len(server.requests) == asked, "bookmarks keep the watch"
        server.freeze()
        server.put(make_service("a"))
        listener.until_exists("a")
        assert listener.events.count(Synced(SERVICE)) == 1, "no list was needed"


@pytest.mark.parametrize("chunked", [True, False])
def test_a_server_that_closes_each_connection_causes_no_failure(
    server: ApiServer, kubeconfig: str, caplog: pytest.LogCaptureFixture, chunked: bool
) -> None:
    """A proxy that speaks HTTP/1.0, or that sends `Connection: close`."""
    server.close_connections = True
    server.chunked = chunked
    server.streaming_lists = "rejected"
    server.put(make_node("node-1"))
    metrics = Metrics()
    brief = dataclasses.replace(QUICK, watch_shortest=1, watch_longest=1)
    with following(kubeconfig, timing=brief, observer=metrics) as listener:
        settle(server, listener)
        server.put(make_service("a"))
        listener.until_exists("a")
        eventually(lambda: sum(request.watch for request in list(server.requests)) >= 9)
        server.put(make_service("b"))
        listener.until_exists("a", "b")
        assert listener.events.count(Synced(SERVICE)) == 1
    failures = metrics.registry.get_sample_value("ebpfproxy_source_watch_errors_total", {"kind": SERVICE})
    assert not failures
    assert not caplog.records


@pytest.mark.parametrize("close", [True, False])
def test_a_watch_may_be_silent_for_longer_than_an_answer(
    server: ApiServer, kubeconfig: str, close: bool
) -> None:
    """The library detaches the socket of an answer with `Connection: close`."""
    server.close_connections = close
    server.put(make_service("a"))
    timing = dataclasses.replace(QUICK, answer=0.3)
    with following(kubeconfig, timing=timing) as listener:
        settle(server, listener)
        asked = len(server.requests)
        time.sleep(1.0)
        assert len(server.requests) == asked
        listener.until_exists("a")


def test_dropped_connections_lose_no_event(server: ApiServer, kubeconfig: str) -> None:
    with following(kubeconfig) as listener:
        for i in range(40):
            server.put(make_service(f"s-{i}"))
            if i % 8 == 0:
                server.drop_connections()
        listener.until(lambda: len(listener.exists[SERVICE]) == 40)


def test_chunks_of_a_stream_may_split_characters(server: ApiServer, kubeconfig: str) -> None:
    server.chunk = 1
    with following(kubeconfig) as listener:
        settle(server, listener)
        server.put(make_service("a", labels={"größe": "日本語"}))
        listener.until_exists("a")


def test_an_invalid_line_in_a_watch_loses_no_event(server: ApiServer, kubeconfig: str) -> None:
    with following(kubeconfig) as listener:
        settle(server, listener)
        server.put(make_service("a"))
        server.inject(b'{"type":"ADDED","object":{"metadata":\n', SERVICE)
        server.put(make_service("b"))
        listener.until_exists("a", "b")
        listener.until_synced(times=2)


def test_an_invalid_object_does_not_end_the_watch(server: ApiServer, kubeconfig: str) -> None:
    server.put(make_service("broken", ports="80"))
    with following(kubeconfig) as listener:
        listener.until_synced()
        assert [event.name for event in listener.events if isinstance(event, Invalid)] == ["default/broken"]
        server.put(make_service("a"))
        listener.until_exists("a")
        server.delete("Service", "default", "broken")
        listener.until(
            lambda: any(isinstance(e, ServiceChanged) and e.name.name == "broken" for e in listener.events)
        )


def test_changes_are_reported_although_watches_end_at_once(server: ApiServer, kubeconfig: str) -> None:
    server.put(make_service("a"))
    server.close_watches = True
    with following(kubeconfig) as listener:
        listener.until_synced()
        eventually(lambda: sum(request.watch for request in list(server.requests)) > 10)
        server.close_watches = False
        server.put(make_service("b"))
        listener.until_exists("a", "b")


def test_requests_are_repeated_after_the_servers_retry_after(server: ApiServer, kubeconfig: str) -> None:
    server.put(make_service("a"))
    server.fail(1, 429, {"Retry-After": "1"}, lambda request: request.path == "/api/v1/services")
    started = time.monotonic()
    with following(kubeconfig) as listener:
        listener.until_exists("a")
        assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_after_temporary_errors_the_watch_continues(server: ApiServer, kubeconfig: str, status: int) -> None:
    server.put(make_service("a"))
    server.fail(12, status)
    with following(kubeconfig) as listener:
        listener.until_exists("a")


# ---- metrics


def test_lists_and_failures_are_counted_in_metrics(server: ApiServer, kubeconfig: str) -> None:
    metrics = Metrics()

    def count(name: str, kind: str) -> float | None:
        return metrics.registry.get_sample_value(f"ebpfproxy_source_{name}_total", {"kind": kind})

    server.put(make_service("a"))
    server.fail(3, 503, match=lambda request: request.path == "/api/v1/services")
    with following(kubeconfig, observer=metrics) as listener:
        settle(server, listener)
        assert [count("relists", kind) for kind in KINDS] == [1] * len(KINDS)
        failures = count("watch_errors", SERVICE)
        assert failures is not None
        assert failures >= 3
        server.put(make_node("node-2"))
        server.compact()
        server.end_watches()
        listener.until_synced(SERVICE, 2)
        listener.until_synced(ENDPOINT_SLICE, 2)
        listener.until_synced(NODE, 2)
        listener.until_synced(SERVICE_CIDR, 2)
        assert [count("relists", kind) for kind in KINDS] == [2] * len(KINDS)
        assert (count("watch_errors", SERVICE) or 0) > failures, "a watch that is too old counts as an error"


# ---- credentials


def test_a_changed_token_file_is_read_again(server: ApiServer, tmp_path: pathlib.Path) -> None:
    """kubeadm's kubeconfig for kube-proxy has a tokenFile, which the client library reads only once."""
    token = tmp_path / "token"
    token.write_text("first\n")
    server.token = "first"
    server.write_kubeconfig(tmp_path / "kubeconfig", token_file=token)
    with following(str(tmp_path / "kubeconfig")) as listener:
        settle(server, listener)
        server.token = "second"
        token.write_text("second")
        server.end_watches()
        eventually(lambda: {"first", "second"} <= {request.token for request in list(server.requests)})
        server.put(make_service("a"))
        listener.until_exists("a")


def test_a_token_that_expires_before_its_file_is_renewed_is_retried(
    server: ApiServer, tmp_path: pathlib.Path
) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    server.token = "first"
    server.write_kubeconfig(tmp_path / "kubeconfig", token_file=token)
    with following(str(tmp_path / "kubeconfig")) as listener:
        settle(server, listener)
        server.token = "second"
        token.unlink()
        server.end_watches()
        eventually(lambda: len(server.requests) > 15)
        token.write_text("second")
        server.put(make_service("a"))
        listener.until_exists("a")


@pytest.fixture
def pod(server: ApiServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A pod's files and variables. KUBERNETES_SERVICE_HOST is unreachable, as without a proxy."""
    from kubernetes.config import incluster_config

    (tmp_path / "token").write_text("secret")
    server.authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    return tmp_path


def test_in_a_pod_the_service_account_is_used_at_the_address_of_master(
    server: ApiServer, pod: pathlib.Path
) -> None:
    """The client library's hook resets the host to the ClusterIP at every request, but this proxy serves
    it."""
    server.put(make_service("a"))
    with following("", server.url) as listener:
        settle(server, listener)
        server.end_watches()
        server.put(make_service("b"))
        listener.until_exists("a", "b")


def test_in_a_pod_a_renewed_token_and_ca_are_used(pod: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with ApiServer() as first:
        first.authority.cert_pem.write_to_path(str(pod / "ca.crt"))
        with following("", first.url) as listener:
            eventually(lambda: watching(first))
            first.stop()
            with ApiServer(first.port, token="renewed") as second:
                second.authority.cert_pem.write_to_path(str(pod / "ca.crt"))
                (pod / "token").write_text("renewed")
                second.put(make_service("a"))
                listener.until_exists("a")


@pytest.mark.parametrize(("host", "hint"), [("127.0.0.1", "ClusterIP"), ("10.96.0.1", "runs")])
def test_the_hint_about_a_cluster_ip_is_given_for_that_only(
    pod: pathlib.Path, monkeypatch: pytest.MonkeyPatch, host: str, hint: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    session = load_configuration("", "https://127.0.0.1:1").session()
    with contextlib.closing(session), pytest.raises(SourceError) as caught:
        session.fetch("/api/v1/services", {})
    assert hint in caught.value.hint


def test_a_certificate_that_is_not_verified_causes_no_warning_for_each_connection(
    server: ApiServer, kubeconfig: str
) -> None:
    config = yaml.safe_load(pathlib.Path(kubeconfig).read_text())
    config["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
    pathlib.Path(kubeconfig).write_text(yaml.safe_dump(config))
    access = load_configuration(kubeconfig, "")
    assert not access.verifies
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.closing(access.session()) as session:
            session.fetch("/api/v1/services", {})


def test_a_certificate_of_another_ca_gives_a_clear_error(server: ApiServer, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "kubeconfig"
    server.write_kubeconfig(path, ca=trustme.CA().cert_pem.bytes())
    session = load_configuration(str(path), "").session()
    with contextlib.closing(session), pytest.raises(SourceError) as caught:
        session.fetch("/api/v1/services", {})
    assert "certificate" in caught.value.message
    assert server.url in caught.value.message
    assert "authority" in caught.value.hint


def test_a_server_that_does_not_listen_gives_a_clear_error(server: ApiServer, kubeconfig: str) -> None:
    server.stop()
    session = load_configuration(kubeconfig, "").session()
    with contextlib.closing(session), pytest.raises(SourceError, match="refused"):
        session.fetch("/api/v1/services", {})


def test_a_redirect_is_not_followed_with_the_token(server: ApiServer, kubeconfig: str) -> None:
    with ApiServer(token=None) as thief:
        server.fail(1, 302, {"Location": thief.url + "/api/v1/services"})
        session = load_configuration(kubeconfig, "").session()
        with contextlib.closing(session), pytest.raises(SourceError, match="302"):
            session.fetch("/api/v1/services", {})
        assert thief.requests == []


# ---- timeouts and stop


def test_a_silent_watch_times_out(server: ApiServer, kubeconfig: str) -> None:
    session = load_configuration(kubeconfig, "").session()
    query = {"watch": "1", "resourceVersion": str(server.put(make_service("a")))}
    with contextlib.closing(session), pytest.raises(WatchSilent, match=r"0\.2 s"):
        list(session.open("/api/v1/services", query, silence=0.2))


def test_a_request_without_response_times_out(server: ApiServer, kubeconfig: str) -> None:
    held, release = threading.Event(), threading.Event()

    def hang_once(request: Request) -> None:
        if request.watch and request.path == "/api/v1/services" and not held.is_set():
            held.set()
            assert release.wait(SOON)

    server.before = hang_once
    with following(kubeconfig, timing=dataclasses.replace(QUICK, answer=0.3)) as listener:
        assert held.wait(SOON)
        server.put(make_service("a"))
        listener.until_exists("a")
        release.set()


def test_the_address_of_the_api_server_is_reported_to_the_agent(server: ApiServer, kubeconfig: str) -> None:
    """No Service may take it over."""
    inbox: Inbox = queue.SimpleQueue()
    config = Config(hostname_override="node-1", kubeconfig=pathlib.Path(kubeconfig))
    sources = Sources(config, inbox, Metrics(), None)
    sources.start()
    try:
        found = None
        while not isinstance(found, ApiServerReached):
            item = inbox.get(timeout=SOON)
            assert isinstance(item, Received)
            found = item.event
    finally:
        sources.stop()
    address = urllib.parse.urlsplit(server.url)
    assert found == ApiServerReached(parse_address(address.hostname or ""), address.port or 0)


def test_stop_ends_running_watches_at_once(server: ApiServer, kubeconfig: str) -> None:
    with following(kubeconfig, timing=Timing()):
        eventually(lambda: watching(server))
        started = time.monotonic()
    assert time.monotonic() - started < SOON  # a watch takes minutes


def test_an_exception_in_one_reflector_ends_the_source(server: ApiServer, kubeconfig: str) -> None:
    """A handler's exception must end the source (kubernetes/kubernetes#28674)."""
    server.put(make_service("a"))

    def put(event: Event) -> None:
        if isinstance(event, ServiceChanged):
            raise ZeroDivisionError

    stop = threading.Event()
    with pytest.raises(ZeroDivisionError):
        ApiSource(load_configuration(kubeconfig, "", QUICK), "node-1", put).run(stop)
    assert stop.is_set()


def test_ten_thousand_services_are_listed(server: ApiServer, kubeconfig: str) -> None:
    server.load(generate(10_000, 10))
    session = load_configuration(kubeconfig, "").session()
    body = session.fetch("/apis/discovery.k8s.io/v1/endpointslices", {})
    assert body.count(b'"addressType"') == 10_000
    session.close()
    with following(kubeconfig, timing=Timing()) as listener:
        listener.until_synced(ENDPOINT_SLICE)
        listener.until_synced(SERVICE)
        assert len(listener.exists[SERVICE]) == len(listener.exists[ENDPOINT_SLICE]) == 10_000
