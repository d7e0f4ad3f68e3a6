"""List and watch one kind of object, independently of the transport.

The protocol (pages, bookmarks, 410 Gone) is described on kubernetes.io, "Kubernetes API Concepts".
"""

import contextlib
import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from ebpfproxy.api.event import Event, Synced
from ebpfproxy.api.parse import ListPage, WatchEvent, object_head, parse_list, parse_watch_event
from ebpfproxy.api.resource import Resource
from ebpfproxy.errors import SourceError
from ebpfproxy.log import Logger
from ebpfproxy.model.service import NamespacedName

log = Logger(__name__)

UNREACHABLE = "API server unreachable, retrying"
"""The kernel continues to forward. After a start the agent programs nothing, and its pod is not ready, until
the API server answers."""
REACHABLE = "API server reachable again"
"""Objects are listed and watched again."""
WATCH_EXPIRED = "Watch expired, listing again"
"""The API server has compacted the resource version of the watch."""
NOT_FOUND = "API server has no such object"
"""The object that the query selects does not exist; `hint` says what depends on it."""

GONE = 410
PAGE = 500
"""Objects in one page of a list."""

_HINTS = {
    401: "renew the token or client certificate; the API server does not accept it",
    403: "grant the service account list and watch on services, nodes and endpointslices.discovery.k8s.io",
    404: "check that this is the address of a Kubernetes API server",
}


class StatusError(SourceError):
    """The API server answered with an HTTP error or an ERROR event. `retry_after` is in seconds."""

    def __init__(self, code: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"the API server answered {code}: {message}", _HINTS.get(code, ""))
        self.code = code
        self.retry_after = retry_after


class WatchGarbled(SourceError):
    """A watch sent a line that is not an event; other events may be lost."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and timeouts, all in seconds. Only tests use other values than the defaults."""

    retry_first: float = 0.8
    retry_last: float = 30.0
    healthy_after: float = 10.0
    """A watch that lasted this long was a success: its end resets the backoff."""
    early: float = 1.0
    """A watch that ends sooner counts as a failure, even if it ended without an error."""
    watch_shortest: float = 300.0
    watch_longest: float = 600.0
    silence: float = 30.0
    """How long a watch may stay silent after its timeoutSeconds before the connection is closed."""
    relist_period: float = 1800.0
    refresh: float = 60.0
    """Credentials older than this are reloaded for the next session."""
    connect: float = 10.0
    answer: float = 65.0
    """For the head of an answer, and between two chunks of a page. The API server's own limit is 60."""
    warn_again: float = 600.0


USUAL_TIMING = Timing()


class Backoff:
    """The seconds to wait after each failure: uniform between `first` and a bound that doubles up to `last`.

    >>> backoff = Backoff(0.8, 30, uniform=lambda low, high: high)
    >>> [backoff.next() for _ in range(7)]
    [1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
    """

    def __init__(
        self, first: float, last: float, uniform: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._first, self._last, self._uniform = first, last, uniform
        self._bound = first

    def next(self) -> float:
        self._bound = min(self._last, self._bound * 2)
        return self._uniform(self._first, self._bound)

    def reset(self) -> None:
        self._bound = self._first


class Connection(Protocol):
    """A connection to the API server. All methods raise SourceError; StatusError for an error answer.

    `fetch` returns the body of an answer. `open` yields the chunks of an endless answer and fails after
    `silence` seconds without a chunk. `abort` ends a stream from another thread: its reader gets an error.
    """

    def fetch(self, path: str, query: Mapping[str, str]) -> bytes: ...
    def open(self, path: str, query: Mapping[str, str], silence: float) -> Iterator[bytes]: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the non-empty lines of a stream of chunks. An unfinished last line is dropped.

    >>> list(split_lines([b'{"a":', b'1}\\n\\n{"b"', b':2}\\n{"c'])) == [b'{"a":1}', b'{"b":2}']
    True
    """
    parts: list[bytes] = []
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = b"".join([*parts, end])
            parts.clear()
            if line:
                yield line
        if rest:
            parts.append(rest)


class Observer(Protocol):
    """Callbacks about lists and failures, for metrics. The thread of the reflector calls them."""

    def relisted(self, kind: str) -> None:
        """All objects of `kind` were listed. This includes the first list."""

    def watch_failed(self, kind: str) -> None:
        """A list or watch of `kind` ended with an error."""


class _NoObserver:
    def relisted(self, kind: str) -> None: ...
    def watch_failed(self, kind: str) -> None: ...


UNOBSERVED: Observer = _NoObserver()
"""The Observer that does nothing."""


LIST, OPEN, STREAM = 1, 2, 3
"""The stages of an attempt, in order: list, open the watch, read the watch."""


class Outage:
    """Logs a failure once, again after `warn_again` seconds, and once when the API server works again."""

    def __init__(self, kind: str, warn_again: float, clock: Callable[[], float]) -> None:
        self._kind, self._warn_again, self._clock = kind, warn_again, clock
        self._stage = 0
        self._since = self._reported_at = 0.0
        self._attempts = 0
        self._reported: set[object] = set()

    def failed(self, stage: int, error: SourceError) -> None:
        """Record a failure at `stage`. Log it if its kind is new or was last logged long ago."""
        now = self._clock()
        if not self._stage:
            self._since, self._attempts = now, 0
        self._stage, self._attempts = stage, self._attempts + 1
        if now - self._reported_at >= self._warn_again:
            self._reported.clear()
        failure = (type(error), getattr(error, "code", None), error.hint)
        if failure not in self._reported:
            self._reported.add(failure)
            self._reported_at = now
            seconds = round(now - self._since, 1)
            log.warning(
                UNREACHABLE, kind=self._kind, reason=error.message, hint=error.hint,
                attempts=self._attempts, seconds=seconds,
            )  # fmt: skip

    def passed(self, stage: int) -> None:
        """Record that `stage` succeeded. This ends an outage at this or an earlier stage."""
        if self._stage and stage >= self._stage:
            seconds = round(self._clock() - self._since, 1)
            log.info(REACHABLE, kind=self._kind, attempts=self._attempts, seconds=seconds)
            self._stage = 0
            self._reported.clear()


class Reflector:
    """Reports every change of one kind of object, whatever the API server does.

    It keeps the resourceVersion of each reported object. Thus a list reports only changed objects, and the
    deletion of known objects that are missing from the list. While the server is unreachable, the reflector
    reports nothing and keeps what it knows. It lists when a watch cannot be resumed. It also lists every half
    hour, because a server may lose deletions without an error (cilium/cilium#48050).

    `relists`, `watch_errors` and `events` are counters that any thread may read.
    """

    def __init__(
        self,
        resource: Resource,
        connect: Callable[[], Connection],
        put: Callable[[Event], object],
        stop: threading.Event,
        timing: Timing = USUAL_TIMING,
        observer: Observer = UNOBSERVED,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.resource = resource
        self.relists = self.watch_errors = self.events = 0
        self._connect, self._put, self._stop = connect, put, stop
        self._timing, self._clock, self._uniform = timing, clock, uniform
        self._observer = observer
        self._wait = wait or stop.wait
        self._backoff = Backoff(timing.retry_first, timing.retry_last, uniform)
        self._outage = Outage(resource.kind, timing.warn_again, clock)
        self._known: dict[NamespacedName, str] = {}
        self._resource_version = ""
        self._stage = LIST
        self._listed_at = self._opened_at = -math.inf
        self._relist_at = 0.0
        self._session: Connection | None = None

    def run(self) -> None:
        """List and watch until `stop` is set. Any exception is a bug of this program."""
        while not self._stop.is_set():
            self._stage = LIST
            try:
                with contextlib.closing(self._connect()) as self._session:
                    self._follow(self._session)
            except SourceError as error:
                if not self._stop.is_set():
                    self._wait(self._after(error))

    def abort(self) -> None:
        """Wake a reader that waits for the server. Set `stop` first."""
        if session := self._session:
            session.abort()

    def _follow(self, session: Connection) -> None:
        if not self._resource_version or self._clock() >= self._relist_at:
            self._list(session)
            self._outage.passed(LIST)
        self._watch(session)

    def _after(self, error: SourceError) -> float:
        """Record a failure; return the seconds to wait."""
        self.watch_errors += 1
        self._observer.watch_failed(self.resource.kind)
        now = self._clock()
        if self._stage == STREAM and now - self._opened_at >= self._timing.healthy_after:
            self._backoff.reset()
        if isinstance(error, WatchGarbled) or (isinstance(error, StatusError) and _conclusive(error.code)):
            self._resource_version = ""
        if isinstance(error, StatusError) and error.code == GONE and self._stage != LIST:
            log.info(WATCH_EXPIRED, kind=self.resource.kind)
            return 0.0 if now - self._listed_at >= self._timing.healthy_after else self._backoff.next()
        self._outage.failed(self._stage, error)
        return max(self._backoff.next(), error.retry_after if isinstance(error, StatusError) else 0.0)

    # ---- list

    def _list(self, session: Connection) -> None:
        """Report new and changed objects, then deleted ones, then Synced."""
        seen: set[NamespacedName] = set()
        first = not self.relists
        query = dict(self.resource.query) | {"limit": str(PAGE)}
        while True:
            try:
                page = self._list_page(session, query, seen)
            except StatusError as error:
                if error.code != GONE or "continue" not in query:
                    raise
                seen.clear()
                query = dict(self.resource.query)  # a list without pages cannot expire
                continue
            if self._stop.is_set():
                raise SourceError("stopped while listing")
            if not page.continue_token:
                break
            query["continue"] = page.continue_token
        for name in [name for name in self._known if name not in seen]:
            self._forget(name)
        if not seen and self.resource.absent:
            log.warning(NOT_FOUND, kind=self.resource.kind, **self.resource.query, hint=self.resource.hint)
            if first:
                self._report(self.resource.absent)
        self._resource_version = page.resource_version
        self._listed_at = self._clock()
        self._relist_at = self._listed_at + self._uniform(0.8, 1.2) * self._timing.relist_period
        self.relists += 1
        self._observer.relisted(self.resource.kind)
        self._put(Synced(self.resource.kind))

    def _list_page(
        self, session: Connection, query: Mapping[str, str], seen: set[NamespacedName]
    ) -> ListPage:
        """Report one page and add its names to `seen`. Return the page without items.

        Items are slices of the page's body. Dropping them frees it before the next page is fetched.
        """
        page = parse_list(session.fetch(self.resource.path, query))
        for raw in page.items:
            if name := self._observe(raw):
                seen.add(name)
        return page._replace(items=())

    def _observe(self, raw: Any) -> NamespacedName | None:
        """Report an object unless its version is known. Return its name, None if it has none."""
        name, version = object_head(raw)
        if name is None or not version or self._known.get(name) != version:
            self._report(self.resource.parse(raw))
        if name is not None:
            self._known[name] = version
        return name

    def _forget(self, name: NamespacedName) -> None:
        self._known.pop(name, None)
        self._report(self.resource.deleted(name))

    def _report(self, event: Event) -> None:
        self.events += 1
        self._put(event)

    # ---- watch

    def _watch(self, session: Connection) -> None:
        """Watch until the server ends the watch or the next list is due. Raises SourceError."""
        self._stage = OPEN
        timing = self._timing
        length = self._uniform(timing.watch_shortest, timing.watch_longest)
        seconds = max(1, math.ceil(min(length, self._relist_at - self._clock())))
        query = dict(self.resource.query) | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._resource_version,
            "timeoutSeconds": str(seconds),
        }
        stream = session.open(self.resource.path, query, seconds + timing.silence)
        self._opened_at = self._clock()
        self._outage.passed(OPEN)
        self._stage = STREAM
        for line in split_lines(stream):
            self._handle(_read_event(line))
            self._outage.passed(STREAM)
            if self._clock() >= self._relist_at:
                return  # not every server ends a watch after timeoutSeconds
        if self._clock() - self._opened_at < timing.early:
            raise SourceError(
                "the watch ended immediately", "check whether an HTTP proxy in between supports watches"
            )
        self._outage.passed(STREAM)
        self._backoff.reset()

    def _handle(self, event: WatchEvent) -> None:
        if event.type in ("ADDED", "MODIFIED"):
            self._observe(event.object)
        elif event.type == "DELETED":
            if name := object_head(event.object).name:
                self._forget(name)
        elif event.type == "ERROR":
            raise StatusError(event.code, event.message)
        self._resource_version = event.resource_version or self._resource_version


def _read_event(line: bytes) -> WatchEvent:
    try:
        return parse_watch_event(line)
    except SourceError as error:
        raise WatchGarbled(error.message, error.hint) from None


def _conclusive(code: int) -> bool:
    """Whether the error code rejects the resourceVersion, so that only a new list helps.

    401, 403, 408 and 429 concern the client or the moment instead.
    """
    return 400 <= code < 500 and code not in (401, 403, 408, 429)
