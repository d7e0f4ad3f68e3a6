"""List and watch one kind of object, independently of the transport.

The protocol (streaming lists, pages, bookmarks, 410 Gone) is described on kubernetes.io, "Kubernetes API
Concepts", and in KEP-3157. Decision 0030 compares the choices of this module with those of client-go.
"""

import contextlib
import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from ebpfproxy.api.connection import (
    USUAL_TIMING,
    Connection,
    StatusError,
    Timing,
    WatchSilent,
    split_lines,
)
from ebpfproxy.api.event import Event, Synced
from ebpfproxy.api.outage import LIST, OPEN, STREAM, Backoff, Outage
from ebpfproxy.api.parse import ListPage, WatchEvent, object_head, parse_list, parse_watch_event
from ebpfproxy.api.resource import Resource
from ebpfproxy.errors import SourceError
from ebpfproxy.log import Logger
from ebpfproxy.model.service import NamespacedName

log = Logger(__name__)

WATCH_EXPIRED = "Watch expired, listing again"
"""The API server has compacted the resource version of the watch."""
NOT_STREAMING = "API server sends no streaming list, listing in the usual way"
"""Streaming lists need Kubernetes 1.32 or the feature gate WatchList. An ordinary list takes more memory."""
NOT_SELECTING = "API server rejects a selector, selecting in the agent"
"""A list without headless Services needs Kubernetes 1.31. An older server sends them, too."""
NO_KIND = "API server does not serve an optional kind, asking again every 10 minutes"
"""The kind does not exist, or the account may not list it; `hint` says what is lacking. Logged once."""
NOT_FOUND = "API server has no such object"
"""The object that the query selects does not exist; `hint` says what depends on it."""

PAGE = 500
"""Objects in one page of a list."""

BAD_REQUEST, FORBIDDEN, MISSING, GONE, GATEWAY_TIMEOUT = 400, 403, 404, 410, 504


class WatchGarbled(SourceError):
    """A watch sent a line that is not an event, or an event out of order; other events may be lost."""


class _NotStreaming(Exception):
    """The API server does not send lists as watches. The message says how it answered."""


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


class Reflector:
    """Reports every change of one kind of object, whatever the API server does.

    It keeps the resourceVersion of each reported object. Thus a list reports only changed objects, and the
    deletion of known objects that are missing from the list. While the server is unreachable, the reflector
    reports nothing and keeps what it knows. It lists at the start, and later only if a watch cannot be
    resumed.

    A list is the beginning of a watch that first sends all objects (a streaming list). If the server does not
    support this, or if the stream breaks, the next list is an ordinary one. Neither is older than what was
    reported before.

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
        self._query = {**resource.query, **resource.narrowing}
        self._connect, self._put, self._stop = connect, put, stop
        self._timing, self._clock, self._uniform = timing, clock, uniform
        self._observer = observer
        self._wait = wait or stop.wait
        self._backoff = Backoff(timing.retry_first, timing.retry_last, timing.retry_reset, uniform, clock)
        self._outage = Outage(resource.kind, timing.warn_again, clock)
        self._known: dict[NamespacedName, str] = {}
        self._version = ""
        self._version_rejected = False
        self._complete = self._lacking = False
        self._stream_failed = False
        self._bookmarks = False
        self._stage = LIST
        self._listed_at = -math.inf
        self._session: Connection | None = None

    def run(self) -> None:
        """List and watch until `stop` is set. Any exception is a bug of this program."""
        while not self._stop.is_set():
            self._stage = LIST
            seconds = 0.0
            try:
                with contextlib.closing(self._connect()) as self._session:
                    seconds = self._follow(self._session)
            except SourceError as error:
                if not self._stop.is_set():
                    seconds = self._after(error)
            if seconds and not self._stop.is_set():
                self._wait(seconds)

    def abort(self) -> None:
        """Wake a reader that waits for the server. Set `stop` first."""
        if session := self._session:
            session.abort()

    def _follow(self, session: Connection) -> float:
        """List if necessary, then watch. Return the seconds to wait before the next watch."""
        stream = None
        if not self._complete:
            stream = self._list(session)
            self._outage.passed(LIST)
        return self._watch(session, stream or self._open(session))

    def _after(self, error: SourceError) -> float:
        """Record a failure; return the seconds to wait."""
        if self.resource.optional and isinstance(error, StatusError) and error.code in (FORBIDDEN, MISSING):
            if not self._lacking:
                log.info(NO_KIND, kind=self.resource.kind, reason=error.message, hint=self.resource.hint)
                self._put(Synced(self.resource.kind))  # the first sync need not wait
            self._lacking = True
            return self._timing.lacking
        self.watch_errors += 1
        self._observer.watch_failed(self.resource.kind)
        if isinstance(error, WatchGarbled):
            self._complete = False
        if isinstance(error, StatusError):
            if error.code == GONE and self._complete:
                # A list that is not older than the last version suffices: no quorum read is needed.
                self._complete = False
                log.info(WATCH_EXPIRED, kind=self.resource.kind)
                listed_long_ago = self._clock() - self._listed_at >= self._timing.expired
                return 0.0 if listed_long_ago else self._backoff.next()
            if _lacks_version(error) or (self._version and _rejects_request(error)):
                self._complete, self._version_rejected = False, True
        self._outage.failed(self._stage, error)
        return max(self._backoff.next(), error.retry_after if isinstance(error, StatusError) else 0.0)

    # ---- list

    def _list(self, session: Connection) -> "_Stream | None":
        """Report all objects. Return the stream that continues as a watch, None after an ordinary list.

        A server may reject the selector that only narrows the list: the list is then requested without it. If
        the server does not have the last version (410, or "Too large resource version" of a server that
        lags behind), the most recent objects are listed at once, as in client-go.
        """
        while True:
            try:
                if not self._stream_failed:
                    try:
                        return self._list_by_watch(session)
                    except (_NotStreaming, WatchSilent) as error:
                        log.debug(NOT_STREAMING, kind=self.resource.kind, reason=str(error))
                self._list_by_pages(session)
                self._stream_failed = False
                return None
            except StatusError as error:
                if error.code == BAD_REQUEST and self._query != self.resource.query:
                    log.debug(NOT_SELECTING, kind=self.resource.kind, reason=error.message)
                    self._query = dict(self.resource.query)
                    continue
                if self._version_rejected or not self._version or not _lacks_version(error):
                    raise
                self._version_rejected = True

    def _list_by_watch(self, session: Connection) -> "_Stream":
        """Report the initial events of a watch. Raises _NotStreaming if the server does not send them."""
        query = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        if self._version and not self._version_rejected:
            query["resourceVersion"] = self._version
        try:
            return self._read_initial_events(self._open(session, query))
        except StatusError as error:
            # 410: a server that ignores the parameters watches from the version, which may have expired.
            # 500: a server of 1.36 on etcd 3.4, which has no RequestWatchProgress. client-go lists then, too.
            if error.code in (BAD_REQUEST, GONE, 422, 500):
                raise _NotStreaming(error.message) from None
            raise

    def _read_initial_events(self, stream: "_Stream") -> "_Stream":
        self._stream_failed = True  # until its end, so that an ordinary list is the next attempt
        seen: set[NamespacedName] = set()
        for event in stream.events:
            name = self._handle(event)
            if name and event.type == "DELETED":
                seen.discard(name)
            elif name:
                seen.add(name)
            elif event.initial_events_end:
                self._stream_failed = False
                self._finish_list(seen, event.resource_version)
                return stream
            elif event.type == "BOOKMARK":
                raise _NotStreaming("a bookmark came before the end of the initial events")
        raise SourceError("the streaming list ended before its last object")

    def _list_by_pages(self, session: Connection) -> None:
        """Report the objects of an ordinary list, from the watch cache of the server if possible.

        The first list may be of any age ("0"), a later one is not older than the last version. A server
        without a watch cache sends pages. `limit` is not sent with a version: it would bypass the cache.
        """
        query = dict(self._query)
        if not self._version_rejected:
            query["resourceVersion"] = self._version or "0"
        if self._version_rejected or not self._version:
            query["limit"] = str(PAGE)
        seen: set[NamespacedName] = set()
        while True:
            try:
                page = self._list_page(session, query, seen)
            except StatusError as error:
                if error.code != GONE or "continue" not in query:
                    raise
                seen.clear()
                query = dict(self._query)  # a list without pages cannot expire
                continue
            if self._stop.is_set():
                raise SourceError("stopped while listing")
            if not page.continue_token:
                self._finish_list(seen, page.resource_version)
                return
            query.pop("resourceVersion", None)  # the token contains it
            query["continue"] = page.continue_token

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

    def _finish_list(self, seen: set[NamespacedName], version: str) -> None:
        """Report the deletion of known objects that are not in `seen`, then Synced."""
        for name in [name for name in self._known if name not in seen]:
            self._forget(name)
        if not seen and self.resource.absent:
            log.warning(NOT_FOUND, kind=self.resource.kind, **self.resource.query, hint=self.resource.hint)
            if not self.relists:
                self._report(self.resource.absent)
        self._version, self._version_rejected, self._complete = version, False, True
        self._listed_at = self._clock()
        self.relists += 1
        self._observer.relisted(self.resource.kind)
        self._put(Synced(self.resource.kind))

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

    def _open(self, session: Connection, initial: Mapping[str, str] | None = None) -> "_Stream":
        """Open a watch: from the last version, or with the parameters `initial` of a streaming list."""
        timing = self._timing
        seconds = math.ceil(self._uniform(timing.watch_shortest, timing.watch_longest))
        query = self._query | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        if initial is None:
            self._stage = OPEN
            query["resourceVersion"] = self._version
            silence = self._silence(seconds)
        else:
            query |= initial
            silence = timing.silence
        chunks = session.open(self.resource.path, query, silence)
        return _Stream(map(_read_event, split_lines(chunks)), seconds, self._clock())

    def _silence(self, seconds: int) -> float:
        """Return how long a watch with this timeoutSeconds may be silent."""
        usual = seconds + self._timing.silence
        return min(usual, self._timing.bookmark_silence) if self._bookmarks else usual

    def _watch(self, session: Connection, stream: "_Stream") -> float:
        """Report events until the server ends the watch. Return the seconds to wait before the next one."""
        self._outage.passed(OPEN)
        continues_list, self._stage = self._stage == LIST, STREAM
        if continues_list:
            session.limit_silence(self._silence(stream.seconds))
        count = 0
        try:
            for event in stream.events:
                count += 1
                if event.type == "BOOKMARK" and not self._bookmarks:
                    self._bookmarks = True
                    session.limit_silence(self._silence(stream.seconds))
                self._handle(event)
                self._outage.passed(STREAM)
        except WatchSilent:
            if self._bookmarks and not count:
                # Either the server sends no bookmarks any more, or it has not reached the version of this
                # watch, because its data was restored from a backup. A list finds out.
                self._bookmarks = self._complete = False
            raise
        lasted = self._clock() - stream.opened_at
        if lasted < self._timing.early and not count:
            raise SourceError(
                "the watch ended immediately", "check whether an HTTP proxy in between supports watches"
            )
        self._outage.passed(STREAM)
        if lasted >= stream.seconds - self._timing.punctual:
            return 0.0
        # The server shuts down and ends the watches of all nodes now. They must not return all at once.
        return self._uniform(0.0, self._timing.retry_first)

    def _handle(self, event: WatchEvent) -> NamespacedName | None:
        """Report an event. Return the name of its object, None if it has none. Raises SourceError."""
        name = None
        if self._complete and event.type != "DELETED" and _older(event.resource_version, self._version):
            raise WatchGarbled(f"the watch went back from {self._version} to {event.resource_version}")
        if event.type in ("ADDED", "MODIFIED"):
            name = self._observe(event.object)
        elif event.type == "DELETED":
            if name := object_head(event.object).name:
                self._forget(name)
        elif event.type == "ERROR":
            raise StatusError(event.code, event.message)
        if self._complete and not _older(event.resource_version, self._version):
            self._version = event.resource_version or self._version
        return name


@dataclasses.dataclass(frozen=True, slots=True)
class _Stream:
    """An open watch. `seconds` is its timeoutSeconds."""

    events: Iterator[WatchEvent]
    seconds: int
    opened_at: float


def _read_event(line: bytes) -> WatchEvent:
    try:
        return parse_watch_event(line)
    except SourceError as error:
        raise WatchGarbled(error.message, error.hint) from None


def _older(version: str, than: str) -> bool:
    """Whether both versions are numbers, which increase (KEP-5504), and the first one is smaller."""
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)


def _lacks_version(error: StatusError) -> bool:
    """Whether the server has no data of the requested version, or only older data."""
    if error.code == GONE:
        return True
    return error.code == GATEWAY_TIMEOUT and "too large resource version" in error.message.lower()


def _rejects_request(error: StatusError) -> bool:
    """Whether the error rejects the request, and so maybe its resourceVersion.

    401, 403, 408 and 429 concern the client or the moment instead.
    """
    return 400 <= error.code < 500 and error.code not in (401, 403, 408, 429)
