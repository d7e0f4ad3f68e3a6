"""The reflector against a scripted connection, with a clock and random numbers of the test's own."""

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ebpfproxy.api.event import SERVICE, Event, Invalid, NodeChanged, ServiceChanged, Synced
from ebpfproxy.api.reflector import (
    REACHABLE,
    UNREACHABLE,
    Backoff,
    Reflector,
    StatusError,
    Timing,
    split_lines,
)
from ebpfproxy.api.resource import Resource, own_node, services
from ebpfproxy.errors import SourceError
from ebpfproxy.model.service import NamespacedName


class Stopped(Exception):
    """The script is over."""


Step = Any
"""bytes answers a list; a list of parts answers a watch; an exception is raised for either."""


class Script:
    """A connection that answers from a list of steps, with a clock that waiting and `spend` advance."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.queries: list[Mapping[str, str]] = []
        self.waits: list[float] = []
        self.now = 1000.0
        self.events: list[Event] = []
        self.observed: list[str] = []

    def __call__(self) -> "Script":
        return self

    def _next(self, query: Mapping[str, str]) -> Step:
        self.queries.append(query)
        if not self.steps:
            raise Stopped
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def fetch(self, path: str, query: Mapping[str, str]) -> bytes:
        assert "watch" not in query
        body = self._next(query)
        assert isinstance(body, bytes)
        return body

    def open(self, path: str, query: Mapping[str, str], silence: float) -> Iterator[bytes]:
        assert silence > float(query["timeoutSeconds"])
        parts = self._next(query)
        assert isinstance(parts, list)
        return self._parts(parts)

    def _parts(self, parts: list[Any]) -> Iterator[bytes]:
        for part in parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, (int, float)):
                self.now += part
            else:
                yield part

    def abort(self) -> None: ...

    def close(self) -> None: ...

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def relisted(self, kind: str) -> None:
        self.observed.append(f"{kind} relisted")

    def watch_failed(self, kind: str) -> None:
        self.observed.append(f"{kind} failed")

    def run(self, resource: Resource | None = None, timing: Timing | None = None) -> Reflector:
        """Until the script is over. Random numbers are always the highest there are."""
        reflector = Reflector(
            resource or services(),
            self,
            self.events.append,
            threading.Event(),
            timing or Timing(),
            self,
            clock=lambda: self.now,
            uniform=lambda low, high: high,
            wait=self.wait,
        )
        with pytest.raises(Stopped):
            reflector.run()
        return reflector

    @property
    def told(self) -> list[str]:
        """The events in short: +name, -name, ?name of an invalid one, "synced"."""
        return [_short(event) for event in self.events]


def _short(event: Event) -> str:
    match event:
        case ServiceChanged():
            return ("+" if event.service else "-") + event.name.name
        case NodeChanged():
            return "+node" if event.node else "-node"
        case Invalid():
            return "?" + event.name
        case Synced():
            return "synced"
    raise AssertionError(event)


def item(name: str, version: int, **spec: object) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "resourceVersion": str(version)}
    ports = [{"port": 80, "protocol": "TCP"}]
    return {"metadata": metadata, "spec": {"clusterIP": "10.0.0.1", "ports": ports} | spec}


def page(version: int, *items: Mapping[str, Any], more: str = "") -> bytes:
    return json.dumps(
        {"metadata": {"resourceVersion": str(version), "continue": more}, "items": items}
    ).encode()


def line(type: str, thing: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": type, "object": thing}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    return line("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


def error(code: int) -> bytes:
    return line("ERROR", {"kind": "Status", "code": code, "message": "as told"})


REFUSED = SourceError("connection refused")


def test_objects_of_all_pages_are_reported_before_synced() -> None:
    script = Script(page(9, item("a", 1), more="t1"), page(9, item("b", 2)))
    script.run()
    assert script.told == ["+a", "+b", "synced"]
    assert script.queries[0]["limit"] == "500"
    assert script.queries[0]["labelSelector"] == (
        "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless"
    )
    assert script.queries[1]["continue"] == "t1"


def test_a_failure_between_pages_sends_no_synced_and_deletes_nothing() -> None:
    """As in cilium/cilium#26912: an incomplete list deletes nothing."""
    whole = page(9, item("a", 1), item("b", 2))
    cut = [page(20, item("a", 1), more="t1"), REFUSED]
    script = Script(whole, StatusError(410, "gone"), *cut, whole)
    script.now = 1000.0
    script.run()
    assert script.told == ["+a", "+b", "synced", "synced"]


def test_a_watch_starts_where_the_list_ended_and_resumes_where_the_last_bookmark_was() -> None:
    script = Script(page(9), [20, line("ADDED", item("a", 11)), bookmark(15), 20], [20])
    script.run()
    assert [query.get("resourceVersion") for query in script.queries] == [None, "9", "15", "15"]
    assert script.queries[1]["allowWatchBookmarks"] == "true"
    assert script.queries[1]["timeoutSeconds"] == "600"
    assert script.waits == []


def test_watched_changes_are_reported() -> None:
    events = [line("ADDED", item("a", 10)), line("MODIFIED", item("a", 11)), line("DELETED", item("a", 12))]
    script = Script(page(9), [*events, 20])
    reflector = script.run()
    assert script.told == ["synced", "+a", "+a", "-a"]
    assert reflector.events == 3


def test_deletions_that_the_watch_missed_are_found_by_the_periodic_relist() -> None:
    """As in cilium/cilium#48050: a server lost deletions without an error of its watches for half an hour."""
    script = Script(
        page(9, item("a", 1), item("b", 2)), [600, bookmark(10)], [600], [600], [600], page(20, item("b", 2))
    )
    reflector = script.run(timing=Timing(relist_period=2000))
    assert script.told == ["+a", "+b", "synced", "-a", "synced"]
    assert reflector.relists == 2


def test_a_watch_that_exceeds_its_timeout_does_not_delay_the_relist() -> None:
    script = Script(page(9), [bookmark(10), 5000, bookmark(11), bookmark(12)], page(20))
    script.run()
    assert script.told == ["synced", "synced"]


def test_a_relist_reports_only_changed_objects() -> None:
    script = Script(
        page(9, item("same", 1), item("other", 2)),
        [error(410)],
        page(20, item("same", 1), item("other", 15), item("new", 16)),
    )
    script.run()
    assert script.told == ["+same", "+other", "synced", "+other", "+new", "synced"]


@pytest.mark.parametrize("gone", [[20, error(410)], StatusError(410, "too old")], ids=["event", "status"])
def test_an_expired_watch_leads_to_a_list_that_reports_missed_deletions(gone: Step) -> None:
    script = Script(page(9, item("a", 1), item("b", 2)), [20], gone, page(30, item("b", 2)))
    script.run()
    assert script.told == ["+a", "+b", "synced", "-a", "synced"]
    assert script.waits == [0.0], "nothing is overloaded; a list now is what is asked for"


def test_alternating_lists_and_expired_watches_do_not_busy_loop() -> None:
    script = Script(*[page(9), [error(410)]] * 6)
    script.run()
    assert script.waits == [1.6, 3.2, 6.4, 12.8, 25.6, 30]


def test_a_server_that_answers_410_to_every_list_causes_no_busy_loop() -> None:
    script = Script(*[StatusError(410, "gone")] * 3)
    script.run()
    assert script.waits == [1.6, 3.2, 6.4]


def test_an_expired_continue_token_restarts_the_list_without_pages() -> None:
    script = Script(
        page(9, item("a", 1), item("b", 2), more="t1"),
        StatusError(410, "expired"),
        page(12, item("b", 2), item("c", 11)),
    )
    script.run()
    assert script.told == ["+a", "+b", "+c", "-a", "synced"]
    assert "limit" not in script.queries[2]
    assert "continue" not in script.queries[2]
    assert script.queries[3]["resourceVersion"] == "12"


def test_waits_grow_to_half_a_minute_and_nothing_is_reported_meanwhile() -> None:
    script = Script(page(9, item("a", 1)), [20], *[REFUSED] * 7, [20, bookmark(10), 20], REFUSED)
    reflector = script.run()
    assert script.waits == [1.6, 3.2, 6.4, 12.8, 25.6, 30, 30, 1.6]
    assert script.told == ["+a", "synced"]
    assert reflector.watch_errors == 8
    assert script.queries[-1]["resourceVersion"] == "10"


def test_the_observer_is_notified_of_lists_and_failures() -> None:
    script = Script(REFUSED, page(9), [20, error(410)], page(20), [])
    reflector = script.run()
    assert script.observed == [
        f"Service {what}" for what in ("failed", "relisted", "failed", "relisted", "failed")
    ]
    assert (reflector.relists, reflector.watch_errors) == (2, 3)


def test_the_observer_counts_a_list_that_fails_between_pages_as_a_failure() -> None:
    script = Script(page(9, item("a", 1), more="t1"), REFUSED)
    script.run()
    assert script.observed == ["Service failed"]


def test_full_jitter_draws_from_the_whole_range() -> None:
    asked: list[tuple[float, float]] = []

    def lowest(low: float, high: float) -> float:
        asked.append((low, high))
        return low

    backoff = Backoff(0.8, 30, lowest)
    assert [backoff.next() for _ in range(3)] == [0.8] * 3
    assert asked == [(0.8, 1.6), (0.8, 3.2), (0.8, 6.4)]


def test_a_stream_that_ends_at_once_does_not_busy_loop() -> None:
    script = Script(page(9), [], [], [bookmark(10)], [])
    script.run()
    assert script.waits == [1.6, 3.2, 6.4, 12.8]


def test_a_connection_that_breaks_after_a_long_time_resets_the_backoff() -> None:
    script = Script(page(9), REFUSED, REFUSED, [30, SourceError("reset")], [20])
    script.run()
    assert script.waits == [1.6, 3.2, 1.6]


def test_retry_after_applies_if_it_is_longer_than_the_backoff() -> None:
    script = Script(page(9), StatusError(429, "slow down", 45.0), StatusError(429, "slow down", 1.0))
    script.run()
    assert script.waits == [45.0, 3.2]


def test_a_status_that_rejects_the_resource_version_leads_to_a_list() -> None:
    script = Script(page(9), StatusError(400, "bad resourceVersion"), page(12))
    script.run()
    assert script.told == ["synced", "synced"]


@pytest.mark.parametrize("code", [401, 403, 429, 500, 503])
def test_a_temporary_status_keeps_the_resource_version_of_the_watch(code: int) -> None:
    script = Script(page(9), StatusError(code, "not now"), [20])
    script.run()
    assert script.queries[2]["resourceVersion"] == "9"


def test_a_line_that_is_not_an_event_leads_to_a_list_and_no_event_is_lost() -> None:
    script = Script(
        page(9, item("a", 1)), [line("ADDED", item("b", 10)), b"{{{\n", line("ADDED", item("c", 11))],
        page(11, item("b", 10), item("c", 11)),
    )  # fmt: skip
    script.run()
    assert script.told == ["+a", "synced", "+b", "+c", "-a", "synced"]


def test_an_invalid_object_is_reported_once_and_stays_known() -> None:
    bad = item("a", 1, clusterIP="junk")
    script = Script(page(9, bad), [line("MODIFIED", item("a", 10, clusterIP="junk")), 20, error(410)],
                    page(12, item("a", 10, clusterIP="junk")), [20, error(410)], page(20))  # fmt: skip
    script.run()
    assert script.told == ["?default/a", "synced", "?default/a", "synced", "-a", "synced"]


def test_an_object_with_labels_that_become_invalid_is_not_deleted() -> None:
    """Its last good state stays, as with any object that cannot be served."""
    junk = item("a", 10)
    junk["metadata"]["labels"] = ["junk"]
    script = Script(page(9, item("a", 1)), [20, error(410)], page(12, junk))
    script.run()
    assert script.told == ["+a", "synced", "?default/a", "synced"]


def test_an_object_without_a_resource_version_is_reported_every_time() -> None:
    bare = item("a", 1)
    bare["metadata"]["resourceVersion"] = 1
    script = Script(page(9, bare), [20, error(410)], page(12, bare), [20, error(410)], page(15))
    script.run()
    assert script.told == ["+a", "synced", "+a", "synced", "-a", "synced"]


def test_a_missing_node_is_reported_as_deleted_and_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script(page(9))
    script.run(own_node("node-1"))
    assert script.told == ["-node", "synced"]
    assert script.queries[0]["fieldSelector"] == "metadata.name=node-1"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "metadata.name=node-1" in str(record.__dict__["values"])


def test_an_empty_list_of_services_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    Script(page(9)).run()
    assert not caplog.records


def test_an_hour_without_the_api_server_logs_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ebpfproxy")
    script = Script(page(9), [20], *[REFUSED] * 125, page(20))
    script.run()
    assert script.told == ["synced", "synced"]
    assert sum(script.waits) > 3600
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert 1 <= len(warnings) <= 7, "one, and one again every ten minutes"
    assert [record.getMessage() for record in caplog.records].count(REACHABLE) == 1


def test_a_watch_that_is_accepted_and_closed_at_once_does_not_log_reachable_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "ebpfproxy")
    Script(page(9), *[[]] * 10).run()
    assert [record.getMessage() for record in caplog.records] == [UNREACHABLE]


def test_missing_permissions_are_logged_once_with_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ebpfproxy")
    Script(*[StatusError(403, "services is forbidden")] * 5).run()
    (record,) = caplog.records
    assert "list and watch" in str(record.__dict__["values"])


def test_a_line_is_joined_from_chunks_that_split_a_character() -> None:
    text = line("ADDED", {"metadata": {"name": "é", "note": "日本"}}).replace(b"\\u00e9", "é".encode())
    for size in (1, 2, 3, 7):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        assert list(split_lines(parts)) == [text[:-1]]


def test_the_event_of_a_deleted_object_has_the_complete_name() -> None:
    script = Script(page(9, item("a", 1)), [20, error(410)], page(12))
    script.run()
    assert ServiceChanged(NamespacedName("default", "a"), None) in script.events
    assert Synced(SERVICE) in script.events
