"""The reflector against a scripted connection, with a clock and random numbers of the test's own."""

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ebpfproxy.api.connection import StatusError, Timing, WatchSilent, split_lines
from ebpfproxy.api.event import SERVICE, Event, Invalid, NodeChanged, ServiceChanged, Synced
from ebpfproxy.api.outage import REACHABLE, UNREACHABLE, Backoff
from ebpfproxy.api.reflector import Reflector
from ebpfproxy.api.resource import Resource, own_node, services
from ebpfproxy.errors import SourceError
from ebpfproxy.model.service import NamespacedName


class Stopped(Exception):
    """The script is over."""


Step = Any
"""bytes answers a list; a list of parts answers a watch; an exception is raised for either.

A part is bytes, the seconds until the next part, or an exception.
"""

UNSUPPORTED = StatusError(422, "sendInitialEvents: Forbidden")


class Script:
    """A connection that answers from a list of steps, with a clock that waiting and parts advance.

    It rejects streaming lists, and does not record them, unless `streaming` is set.
    """

    def __init__(self, *steps: Step, streaming: bool = False) -> None:
        self.streaming = streaming
        self.silence: list[float] = []
        self.steps = list(steps)
        self.queries: list[Mapping[str, str]] = []
        self.waits: list[float] = []
        self.now = 1000.0
        self.events: list[Event] = []
        self.observed: list[str] = []

    def __call__(self) -> "Script":
        return self

    def _next(self, query: Mapping[str, str]) -> Step:
        self.queries.append(dict(query))
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
        assert query["watch"] == "1"
        if "sendInitialEvents" in query and not self.streaming:
            raise UNSUPPORTED
        self.silence.append(silence)
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

    def limit_silence(self, seconds: float) -> None:
        self.silence.append(seconds)

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
    def reported(self) -> list[str]:
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


def end(version: int) -> bytes:
    """The bookmark that ends the initial events of a streaming list."""
    annotations = {"k8s.io/initial-events-end": "true"}
    return line("BOOKMARK", {"metadata": {"resourceVersion": str(version), "annotations": annotations}})


def error(code: int) -> bytes:
    return line("ERROR", {"kind": "Status", "code": code, "message": "from the server"})


REFUSED = SourceError("connection refused")
SILENT = WatchSilent("nothing received")


def test_objects_of_all_pages_are_reported_before_synced() -> None:
    script = Script(page(9, item("a", 1), more="t1"), page(9, item("b", 2)))
    script.run()
    assert script.reported == ["+a", "+b", "synced"]
    assert script.queries[0]["limit"] == "500"
    assert script.queries[0]["labelSelector"] == "!service.kubernetes.io/service-proxy-name"
    assert script.queries[0]["fieldSelector"] == "spec.clusterIP!=None"
    assert script.queries[1]["continue"] == "t1"
    assert [query.get("resourceVersion") for query in script.queries] == ["0", None, "9"]


def test_without_the_field_selector_that_the_server_rejects_objects_are_listed_at_once() -> None:
    script = Script(StatusError(400, "not a known field selector"), page(9, item("a", 1)), [600])
    script.run()
    assert script.reported == ["+a", "synced"]
    assert ["fieldSelector" in query for query in script.queries] == [True, False, False, False]
    assert script.waits == []


def test_a_request_that_the_server_also_rejects_without_the_selector_is_an_error() -> None:
    script = Script(StatusError(400, "bad"), StatusError(400, "bad"), page(9))
    script.run()
    assert script.observed == ["Service failed", "Service relisted"]
    assert len(script.waits) == 1


def test_a_failure_between_pages_sends_no_synced_and_deletes_nothing() -> None:
    """As in cilium/cilium#26912: an incomplete list deletes nothing."""
    whole = page(9, item("a", 1), item("b", 2))
    cut = [page(20, item("a", 1), more="t1"), REFUSED]
    script = Script(whole, StatusError(410, "gone"), *cut, whole)
    script.now = 1000.0
    script.run()
    assert script.reported == ["+a", "+b", "synced", "synced"]


def test_a_watch_starts_where_the_list_ended_and_resumes_where_the_last_bookmark_was() -> None:
    script = Script(page(9), [20, line("ADDED", item("a", 11)), bookmark(15), 580], [600])
    script.run()
    assert [query.get("resourceVersion") for query in script.queries] == ["0", "9", "15", "15"]
    assert script.queries[1]["allowWatchBookmarks"] == "true"
    assert script.queries[1]["timeoutSeconds"] == "600"
    assert script.waits == []


def test_watched_changes_are_reported() -> None:
    events = [line("ADDED", item("a", 10)), line("MODIFIED", item("a", 11)), line("DELETED", item("a", 12))]
    script = Script(page(9), [*events, 20])
    reflector = script.run()
    assert script.reported == ["synced", "+a", "+a", "-a"]
    assert reflector.events == 3


def test_a_relist_reports_only_changed_objects() -> None:
    script = Script(
        page(9, item("same", 1), item("other", 2)),
        [error(410)],
        page(20, item("same", 1), item("other", 15), item("new", 16)),
    )
    script.run()
    assert script.reported == ["+same", "+other", "synced", "+other", "+new", "synced"]


@pytest.mark.parametrize("gone", [[20, error(410)], StatusError(410, "too old")], ids=["event", "status"])
def test_an_expired_watch_leads_to_a_list_that_reports_missed_deletions(gone: Step) -> None:
    script = Script(page(9, item("a", 1), item("b", 2)), [600], gone, page(30, item("b", 2)))
    script.run()
    assert script.reported == ["+a", "+b", "synced", "-a", "synced"]
    assert script.waits == [], "nothing is overloaded; a list now is what is asked for"


def test_alternating_lists_and_expired_watches_do_not_busy_loop() -> None:
    script = Script(*[page(9), [error(410)]] * 6)
    script.run()
    assert script.waits == [1.6, 3.2, 6.4, 12.8, 25.6, 51.2]


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
    assert script.reported == ["+a", "+b", "+c", "-a", "synced"]
    assert script.queries[2].keys().isdisjoint({"limit", "resourceVersion"})
    assert "continue" not in script.queries[2]
    assert script.queries[3]["resourceVersion"] == "12"


def test_waits_grow_to_a_minute_and_nothing_is_reported_meanwhile() -> None:
    script = Script(page(9, item("a", 1)), [600], *[REFUSED] * 7, [200, bookmark(10), 400], REFUSED)
    reflector = script.run()
    assert script.waits == [1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60, 1.6]
    assert script.reported == ["+a", "synced"]
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


def test_waits_are_drawn_from_ranges_that_double() -> None:
    asked: list[tuple[float, float]] = []

    def lowest(low: float, high: float) -> float:
        asked.append((low, high))
        return low

    backoff = Backoff(0.8, 30, uniform=lowest, clock=lambda: 0.0)
    assert [backoff.next() for _ in range(3)] == [0.8, 1.6, 3.2]
    assert asked == [(0.8, 1.6), (1.6, 3.2), (3.2, 6.4)]


def test_two_minutes_after_the_last_failure_the_waits_start_again() -> None:
    now = 0.0
    backoff = Backoff(0.8, 30, 120, lambda low, high: low, lambda: now)
    assert [backoff.next(), backoff.next()] == [0.8, 1.6]
    now = 119.0
    assert backoff.next() == 3.2
    now = 239.0
    assert backoff.next() == 0.8


def test_a_stream_that_ends_at_once_does_not_busy_loop() -> None:
    script = Script(page(9), [], [], [bookmark(10)], [])
    script.run()
    assert script.waits == [1.6, 3.2, 0.8, 6.4], "a watch with an event is no failure, but a server that ends"


def test_a_watch_that_ends_at_its_timeout_is_followed_by_the_next_one_at_once() -> None:
    script = Script(page(9), [600], [596], [600])
    script.run()
    assert script.waits == []
    assert script.observed == ["Service relisted"]


def test_a_watch_that_a_server_ends_early_is_followed_by_a_random_short_wait() -> None:
    """A server that shuts down ends the watches of all nodes at the same time."""
    script = Script(page(9), [200], [20, bookmark(10), 20], [])
    script.run()
    assert script.waits == [0.8, 0.8, 1.6]
    assert script.observed == ["Service relisted", "Service failed"], "an early end is not a failure"


def test_retry_after_applies_if_it_is_longer_than_the_backoff() -> None:
    script = Script(page(9), StatusError(429, "slow down", 45.0), StatusError(429, "slow down", 1.0))
    script.run()
    assert script.waits == [45.0, 3.2]


def test_a_status_that_rejects_the_resource_version_leads_to_a_list() -> None:
    script = Script(page(9), StatusError(400, "bad resourceVersion"), page(12))
    script.run()
    assert script.reported == ["synced", "synced"]


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
    assert script.reported == ["+a", "synced", "+b", "+c", "-a", "synced"]


def test_an_invalid_object_is_reported_once_and_stays_known() -> None:
    bad = item("a", 1, clusterIP="junk")
    script = Script(page(9, bad), [line("MODIFIED", item("a", 10, clusterIP="junk")), 20, error(410)],
                    page(12, item("a", 10, clusterIP="junk")), [20, error(410)], page(20))  # fmt: skip
    script.run()
    assert script.reported == ["?default/a", "synced", "?default/a", "synced", "-a", "synced"]


def test_an_object_with_labels_that_become_invalid_is_not_deleted() -> None:
    """Its last good state stays, as with any object that cannot be served."""
    junk = item("a", 10)
    junk["metadata"]["labels"] = ["junk"]
    script = Script(page(9, item("a", 1)), [20, error(410)], page(12, junk))
    script.run()
    assert script.reported == ["+a", "synced", "?default/a", "synced"]


def test_an_object_without_a_resource_version_is_reported_every_time() -> None:
    bare = item("a", 1)
    bare["metadata"]["resourceVersion"] = 1
    script = Script(page(9, bare), [20, error(410)], page(12, bare), [20, error(410)], page(15))
    script.run()
    assert script.reported == ["+a", "synced", "+a", "synced", "-a", "synced"]


def test_a_missing_node_is_reported_as_deleted_and_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script(page(9))
    script.run(own_node("node-1"))
    assert script.reported == ["-node", "synced"]
    assert script.queries[0]["fieldSelector"] == "metadata.name=node-1"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "metadata.name=node-1" in str(record.__dict__["values"])


def test_an_empty_list_of_services_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    Script(page(9)).run()
    assert not caplog.records


def test_two_hours_without_the_api_server_logs_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ebpfproxy")
    script = Script(page(9), [20], *[REFUSED] * 125, [600])
    script.run()
    assert script.reported == ["synced"]
    assert sum(script.waits) > 7200
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert 1 <= len(warnings) <= 13, "one, and one again every ten minutes"
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


# ---- streaming lists


def test_a_streaming_list_reports_all_objects_and_continues_as_a_watch() -> None:
    script = Script(
        [
            line("ADDED", item("a", 1)),
            line("ADDED", item("b", 5)),
            end(9),
            line("DELETED", item("a", 11)),
            600,
        ],
        streaming=True,
    )
    reflector = script.run()
    assert script.reported == ["+a", "+b", "synced", "-a"]
    assert reflector.relists == 1
    first, second = script.queries
    assert first["sendInitialEvents"] == "true"
    assert first["resourceVersionMatch"] == "NotOlderThan"
    assert first["allowWatchBookmarks"] == "true"
    assert "resourceVersion" not in first, "the first list is consistent"
    assert "sendInitialEvents" not in second
    assert "resourceVersionMatch" not in second
    assert second["resourceVersion"] == "11"


def test_objects_that_a_later_streaming_list_lacks_are_deleted_at_its_end() -> None:
    initial = [line("ADDED", item("a", 1)), line("ADDED", item("b", 5)), end(9)]
    script = Script(
        [*initial, error(410)],
        [line("ADDED", item("b", 5)), line("ADDED", item("c", 12)), line("DELETED", item("c", 13)), end(14)],
        streaming=True,
    )
    script.run()
    assert script.reported == ["+a", "+b", "synced", "+c", "-c", "-a", "synced"]
    assert script.queries[1]["resourceVersion"] == "9", "not older than what was reported"
    assert script.queries[1]["sendInitialEvents"] == "true"


@pytest.mark.parametrize("cut", [[20], [20, REFUSED], [20, b"{{{\n"]], ids=["end", "error", "garbled"])
def test_a_streaming_list_that_breaks_deletes_nothing_and_is_followed_by_an_ordinary_one(
    cut: list[Any],
) -> None:
    whole = [line("ADDED", item("a", 1)), line("ADDED", item("b", 5)), end(9), error(410)]
    script = Script(
        whole,
        [line("ADDED", item("b", 5)), *cut],
        page(20, item("a", 1), item("b", 5)),
        StatusError(410, "gone"),
        [end(30)],
        streaming=True,
    )
    script.run()
    assert script.reported == ["+a", "+b", "synced", "synced", "-a", "-b", "synced"]
    assert script.queries[2]["resourceVersion"] == "9"
    assert script.queries[2].keys().isdisjoint({"watch", "limit"}), "a limit would bypass the watch cache"
    assert "sendInitialEvents" in script.queries[4], "after an ordinary list, streaming is tried again"


@pytest.mark.parametrize("code", [400, 422])
def test_a_server_that_rejects_streaming_lists_is_listed_at_once_and_without_a_warning(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ebpfproxy")
    script = Script(StatusError(code, "sendInitialEvents: Forbidden"), page(9, item("a", 1)), streaming=True)
    reflector = script.run()
    assert script.reported == ["+a", "synced"]
    assert script.waits == []
    assert reflector.watch_errors == 0
    assert not caplog.records


def test_an_expired_version_in_a_server_that_ignores_the_parameters_causes_no_quorum_read() -> None:
    first = [[line("ADDED", item("a", 1)), SILENT], page(9, item("a", 1)), [600]]
    script = Script(*first, StatusError(410, "expired"), [error(410)], page(20), [600], streaming=True)
    script.run()
    assert script.reported == ["+a", "synced", "-a", "synced"]
    assert script.queries[-3]["resourceVersion"] == "9"
    assert script.waits == []


@pytest.mark.parametrize("then", [SILENT, bookmark(9)], ids=["silence", "bookmark"])
def test_a_server_that_ignores_the_parameters_is_listed_at_once(then: Step) -> None:
    script = Script([line("ADDED", item("a", 1)), then], page(9, item("a", 1)), streaming=True)
    reflector = script.run()
    assert script.reported == ["+a", "synced"]
    assert script.waits == []
    assert reflector.watch_errors == 0
    assert script.silence == [30.0, 630.0], "an end of the initial events is expected after half a minute"


TOO_LARGE = StatusError(504, "Timeout: Too large resource version: 9, current: 5")


@pytest.mark.parametrize(
    ("streaming", "rejection"), [(True, TOO_LARGE), (False, TOO_LARGE), (False, StatusError(410, "expired"))]
)
def test_a_version_that_the_server_does_not_have_leads_to_a_consistent_list_at_once(
    streaming: bool, rejection: StatusError
) -> None:
    if streaming:
        before: list[Step] = [[line("ADDED", item("a", 1)), end(9), 600]]
        after: list[Step] = [[line("ADDED", item("b", 4)), end(5), 600]]
    else:
        before = [page(9, item("a", 1)), [600]]
        after = [page(5, item("b", 4)), [600]]
    script = Script(*before, StatusError(410, "expired"), rejection, *after, streaming=streaming)
    script.run()
    assert script.reported == ["+a", "synced", "+b", "-a", "synced"]
    rejected, accepted = script.queries[len(before) + 1 :][:2]
    assert rejected["resourceVersion"] == "9"
    assert "resourceVersion" not in accepted
    assert script.queries[-1]["resourceVersion"] == "5"
    assert script.waits == []


def test_a_gateway_timeout_keeps_the_resource_version_of_the_watch() -> None:
    script = Script(page(9), StatusError(504, "Gateway Timeout"), [600])
    script.run()
    assert script.queries[-2]["resourceVersion"] == "9"
    assert script.waits == [1.6]


# ---- watches that send nothing


def test_silence_is_limited_to_three_bookmark_intervals_once_a_bookmark_came() -> None:
    script = Script([end(9), 60, bookmark(10), 540], [540, bookmark(12), 60], streaming=True)
    script.run()
    assert script.silence[:4] == [30.0, 630.0, 180.0, 180.0]


def test_a_watch_of_a_server_without_bookmarks_may_be_silent_until_its_timeout() -> None:
    script = Script(page(9), [600], [300, line("ADDED", item("a", 11)), 300])
    script.run()
    assert script.silence == [630.0] * 3
    assert script.waits == []


def test_a_watch_that_becomes_silent_is_resumed() -> None:
    script = Script(page(9), [60, bookmark(10), SILENT], [60, bookmark(12), 540])
    script.run()
    assert script.reported == ["synced"]
    assert script.queries[2]["resourceVersion"] == "10"
    assert script.waits == [1.6]


def test_a_resumed_watch_that_stays_silent_leads_to_a_list() -> None:
    """If etcd was restored from a backup, a watch of a later version is accepted and sends nothing."""
    script = Script(
        page(90, item("a", 1)),
        [60, bookmark(91), SILENT],
        [SILENT],
        StatusError(504, "Timeout: Too large resource version: 91, current: 50"),
        page(50),
        [600],
    )
    script.run()
    assert script.reported == ["+a", "synced", "-a", "synced"]
    assert script.silence == [630.0, 180.0, 180.0, 630.0, 630.0], "bookmarks are expected only from now on"


def test_a_watch_that_goes_back_leads_to_a_list() -> None:
    script = Script(page(9, item("a", 1)), [line("ADDED", item("b", 7))], page(9, item("a", 1)))
    script.run()
    assert script.reported == ["+a", "synced", "synced"]


def test_a_deletion_with_the_last_version_of_its_object_does_not_take_the_watch_back() -> None:
    script = Script(page(9, item("a", 1)), [line("DELETED", item("a", 1)), 600], [600])
    script.run()
    assert script.reported == ["+a", "synced", "-a"]
    assert script.queries[2]["resourceVersion"] == "9"
