"""Services, EndpointSlices and our own Node from the API server: list, watch, and list again.

The kubernetes client gives its configuration, authentication and transport; its models and its Watch are not
used (they cost a hundred times the memory, never back off, and one bad object ends the whole stream). It is
imported where the first configuration is loaded, not with this module: it takes 30 MB.

The protocol is that of kubernetes.io, "Kubernetes API Concepts": pages, bookmarks, 410 Gone. What kube-proxy
selects is in kubernetes, cmd/kube-proxy/app/server.go, Run.
"""

import contextlib
import dataclasses
import math
import os
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from ebpfproxy.errors import ConfigError, SourceError
from ebpfproxy.log import Logger
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.source import fields
from ebpfproxy.source.event import (
    ENDPOINT_SLICE,
    NODE,
    SERVICE,
    Event,
    NodeChanged,
    ServiceChanged,
    SliceChanged,
    Synced,
)
from ebpfproxy.source.parse import (
    WatchEvent,
    object_name,
    parse_list,
    parse_node,
    parse_service,
    parse_slice,
    parse_status_reason,
    parse_watch_event,
)

log = Logger(__name__)

GONE = 410
PAGE = 500
"""Objects of one page of a list."""

SELECTOR = "!service.kubernetes.io/service-proxy-name,!service.kubernetes.io/headless"
"""What is left to another proxy, and what needs none; of Services and EndpointSlices alike."""

_RIGHTS = (
    "the service account needs list and watch on services, nodes, and endpointslices of discovery.k8s.io"
)
_HINTS = {
    401: "the token or client certificate is not accepted; has it expired?",
    403: _RIGHTS,
    404: "is this the address of a Kubernetes API server?",
}
_KEEPALIVE = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""A peer that has vanished is noticed within a minute."""


class StatusError(SourceError):
    """The API server answered with an error: by HTTP, or by an ERROR event. `retry_after` is in seconds."""

    def __init__(self, code: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"the API server says {code}: {message}", _HINTS.get(code, ""))
        self.code = code
        self.retry_after = retry_after


class WatchGarbled(SourceError):
    """A watch sent what is no event, so nobody knows what else it did not send."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """All in seconds. Tests have their own; nobody else should."""

    retry_first: float = 0.8
    retry_last: float = 30.0
    healthy_after: float = 10.0
    """A watch that lasted as long was a success: what follows is a new failure, not one more."""
    early: float = 1.0
    """A watch that ends sooner is a failure, however politely it ended."""
    watch_shortest: float = 300.0
    watch_longest: float = 600.0
    silence: float = 30.0
    """How long after its timeoutSeconds a watch may stay silent before its connection is given up."""
    relist_period: float = 1800.0
    refresh: float = 60.0
    """Credentials older than this are read again for the next session."""
    connect: float = 10.0
    answer: float = 65.0
    """For the head of an answer, and between two parts of a page; the API server's own limit is 60."""
    warn_again: float = 600.0


class Backoff:
    """Seconds to wait after each failure: drawn evenly from `first` up to a bound that doubles, up to `last`.

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


# ---- configuration and transport


def load_configuration(kubeconfig: str, master: str, timing: Timing = Timing()) -> "Access":
    """How to reach the API server: by a kubeconfig file, or, where `kubeconfig` is "", as a pod does.

    `master` overrides the server's URL. It matters in a pod: the usual address there is a ClusterIP, which
    is ours to serve. With `master` alone, outside a pod, there are no credentials.

    Raises ConfigError.
    """
    return Access(kubeconfig, master, timing)


class Access:
    """The API server's address, our credentials, its certificate. Safe for threads.

    The files behind it are read again by the minute, when a session begins: tokens of service accounts live
    for an hour, and the client itself reads the tokenFile of a kubeconfig once only.
    """

    def __init__(self, kubeconfig: str, master: str, timing: Timing) -> None:
        self._kubeconfig, self._master, self.timing = kubeconfig, master, timing
        self._lock = threading.Lock()
        self._configuration = _read_configuration(kubeconfig, master)
        self._read_at = time.monotonic()
        self.server: str = master or self._configuration.host
        _check_server(self.server)

    def session(self) -> "Session":
        """A session with the credentials of now; those of before where they cannot be read now."""
        with self._lock:
            if time.monotonic() - self._read_at >= self.timing.refresh:
                try:
                    self._configuration = _read_configuration(self._kubeconfig, self._master)
                    self.server = self._master or self._configuration.host
                except ConfigError as error:
                    log.warning("credentials could not be read again", reason=error.message)
                self._read_at = time.monotonic()
            return Session(self._configuration, self.server, self.timing)


def _check_server(server: str) -> None:
    parts = urllib.parse.urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{server!r} is not the URL of an API server", "write it as https://address:port")


def _read_configuration(kubeconfig: str, master: str) -> Any:
    """A kubernetes.client.Configuration. Raises ConfigError."""
    import kubernetes

    config: Any = kubernetes.config  # some of its releases are typed in part
    configuration = kubernetes.client.Configuration()
    try:
        if kubeconfig:
            with open(kubeconfig, "rb"):  # the client takes a missing file for an empty one
                config.load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)
        elif not master or "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(configuration)
    except OSError as error:
        where = error.filename or kubeconfig
        raise ConfigError(f"{where} cannot be read: {error.strerror}", "see --kubeconfig") from None
    except Exception as error:  # the client lets YAML, key, type and Base64 errors of a junk file through
        reason = " ".join(str(error).split())
        if kubeconfig:
            raise ConfigError(f"{kubeconfig} is no usable kubeconfig: {reason}", "") from None
        raise ConfigError(
            f"not in a pod that can reach an API server: {reason}",
            "give --kubeconfig, or run in a pod with a mounted service account token",
        ) from None
    configuration.socket_options = _KEEPALIVE
    return configuration


class Session:
    """Requests of one thread, over one connection where the server keeps it open.

    Each session has a connection pool of its own, so that changed certificates come into force with it.
    """

    def __init__(self, configuration: Any, server: str, timing: Timing) -> None:
        from kubernetes.client.rest import RESTClientObject

        self._configuration, self._server, self._timing = configuration, server.rstrip("/"), timing
        try:
            self._pool = RESTClientObject(configuration).pool_manager
        except (OSError, ValueError) as error:  # a proxy URL that is none, a certificate file that is gone
            raise SourceError(f"no connection can be made: {error}") from None
        self._response: Any = None
        self._socket: socket.socket | None = None

    def fetch(self, path: str, query: Mapping[str, str]) -> bytes:
        """The body of an answer. Raises SourceError, StatusError where the server sent one."""
        with _spoken(self._server):
            body: bytes = self._request(path, query).data
            return body

    def open(self, path: str, query: Mapping[str, str], silence: float) -> Iterator[bytes]:
        """The parts of an endless answer as they come, once the server has accepted the request.

        More than `silence` seconds without one is an error. Raises SourceError at once or while reading.
        """
        with _spoken(self._server):
            self._response = self._request(path, query)
            self._socket = getattr(self._response.connection, "sock", None)
            if self._socket:
                self._socket.settimeout(silence)
        return self._chunks()

    def _chunks(self) -> Iterator[bytes]:
        with _spoken(self._server):
            yield from self._response.stream(1 << 16)

    def _request(self, path: str, query: Mapping[str, str]) -> Any:
        import urllib3

        response = self._pool.request(
            "GET",
            f"{self._server}{path}?{urllib.parse.urlencode(query)}",
            headers={"Accept": "application/json", "User-Agent": "ebpfproxy"} | self._credentials(),
            timeout=urllib3.Timeout(connect=self._timing.connect, read=self._timing.answer),
            preload_content=False,
            retries=False,  # redirects included: a token goes to no other host
        )
        if response.status != 200:
            raise _status_error(response)
        return response

    def _credentials(self) -> dict[str, str]:
        """Headers by the client's own hooks, which renew a token that has expired."""
        settings = self._configuration.auth_settings().values()
        return {one["key"]: one["value"].strip() for one in settings if one["value"]}

    def abort(self) -> None:
        """End a stream from another thread: its reader gets an error."""
        if self._socket:
            with contextlib.suppress(OSError):
                # The plain socket's, because SSLSocket.shutdown pulls the TLS state from under the reader.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket = None
        if self._response:
            self._response.close()
        self._pool.clear()


@contextlib.contextmanager
def _spoken(server: str) -> Iterator[None]:
    """Turn what the transport raises into SourceError."""
    import urllib3.exceptions
    from kubernetes.config import ConfigException

    try:
        yield
    except urllib3.exceptions.SSLError as error:
        raise SourceError(
            f"the certificate of {server} is not accepted: {error}",
            "the authority that the kubeconfig or the pod trusts must have issued it, and for this address",
        ) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise SourceError(
            f"{server} cannot be reached: {error}",
            "where it is a Service's address, --master names one that needs no proxy",
        ) from None
    except (ValueError, ConfigException) as error:
        raise SourceError(f"no credentials to send to {server}: {error}") from None


def _status_error(response: Any) -> StatusError:
    """From an answer that is no success; its body is a Status, or anything."""
    message = parse_status_reason(response.data)[1] or response.reason or "no reason given"
    seconds = response.headers.get("Retry-After", "")
    return StatusError(response.status, message, min(float(seconds), 600.0) if seconds.isdecimal() else 0.0)


# ---- one kind of object


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """What a reflector reflects. `absent` is told when the first list is empty."""

    kind: str
    path: str
    query: Mapping[str, str]
    parse: Callable[[Any], Event]
    gone: Callable[[NamespacedName], Event]
    absent: Event | None = None


def services() -> Resource:
    selector = {"labelSelector": SELECTOR}
    return Resource(
        SERVICE, "/api/v1/services", selector, parse_service, lambda name: ServiceChanged(name, None)
    )


def endpoint_slices() -> Resource:
    path, selector = "/apis/discovery.k8s.io/v1/endpointslices", {"labelSelector": SELECTOR}
    return Resource(ENDPOINT_SLICE, path, selector, parse_slice, lambda name: SliceChanged(name, None))


def own_node(name: str) -> Resource:
    selector, gone = {"fieldSelector": f"metadata.name={name}"}, NodeChanged(None)
    return Resource(NODE, "/api/v1/nodes", selector, parse_node, lambda name: gone, gone)


class Connection(Protocol):
    """A Session, as far as a reflector needs it."""

    def fetch(self, path: str, query: Mapping[str, str]) -> bytes: ...
    def open(self, path: str, query: Mapping[str, str], silence: float) -> Iterator[bytes]: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The non-empty lines of a stream whose parts end anywhere; an unfinished last one is dropped.

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


def _version(raw: Any) -> str:
    """The resourceVersion of a listed object; "" where it has none."""
    try:
        head = fields.WATCH_OBJECT_DECODER.decode(raw).metadata
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return (head and head.resource_version) or ""


LIST, OPEN, STREAM = 1, 2, 3
"""How far an attempt came: it lists, it opens the watch, it reads the watch."""


class Outage:
    """Says once that something fails, again every so often, and once that it works again."""

    def __init__(self, kind: str, warn_again: float, clock: Callable[[], float]) -> None:
        self._kind, self._warn_again, self._clock = kind, warn_again, clock
        self._stage = 0
        self._since = self._told_at = 0.0
        self._attempts = 0
        self._told: set[object] = set()

    def failed(self, stage: int, error: SourceError) -> None:
        now = self._clock()
        if not self._stage:
            self._since, self._attempts = now, 0
        self._stage, self._attempts = stage, self._attempts + 1
        if now - self._told_at >= self._warn_again:
            self._told.clear()
        what = (type(error), getattr(error, "code", None), error.hint)
        if what not in self._told:
            self._told.add(what)
            self._told_at = now
            seconds = round(now - self._since, 1)
            log.warning(
                "API server fails", kind=self._kind, reason=error.message, hint=error.hint,
                attempts=self._attempts, seconds=seconds,
            )  # fmt: skip

    def passed(self, stage: int) -> None:
        """`stage` has worked. It ends an outage that was at this stage or an earlier one."""
        if self._stage and stage >= self._stage:
            seconds = round(self._clock() - self._since, 1)
            log.info("API server is back", kind=self._kind, attempts=self._attempts, seconds=seconds)
            self._stage = 0
            self._told.clear()


class Reflector:
    """Tells every change of one kind, for as long as it runs, whatever the server does.

    It knows the resourceVersion of each object told, so a list tells only what has changed since, and
    that what is missing from it is gone. Where the server cannot be reached, nothing is told and nothing
    forgotten. Lists come when a watch cannot be resumed, and every half an hour besides: a server may lose
    deletions and be none the wiser (cilium/cilium#48050).

    `relists`, `watch_errors` and `events` are counters which any thread may read.
    """

    def __init__(
        self,
        resource: Resource,
        connect: Callable[[], Connection],
        put: Callable[[Event], object],
        stop: threading.Event,
        timing: Timing = Timing(),
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.resource = resource
        self.relists = self.watch_errors = self.events = 0
        self._connect, self._put, self._stop = connect, put, stop
        self._timing, self._clock, self._uniform = timing, clock, uniform
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
        """Until `stop` is set. Whatever else it raises is a fault of ours."""
        while not self._stop.is_set():
            self._stage = LIST
            try:
                with contextlib.closing(self._connect()) as self._session:
                    self._follow(self._session)
            except SourceError as error:
                if not self._stop.is_set():
                    self._wait(self._after(error))

    def abort(self) -> None:
        """Wake a reader that waits for the server; `stop` is to be set before."""
        if session := self._session:
            session.abort()

    def _follow(self, session: Connection) -> None:
        if not self._resource_version or self._clock() >= self._relist_at:
            self._list(session)
            self._outage.passed(LIST)
        self._watch(session)

    def _after(self, error: SourceError) -> float:
        """Note a failure; returns how many seconds to wait."""
        self.watch_errors += 1
        now = self._clock()
        if self._stage == STREAM and now - self._opened_at >= self._timing.healthy_after:
            self._backoff.reset()
        if isinstance(error, WatchGarbled) or (isinstance(error, StatusError) and _conclusive(error.code)):
            self._resource_version = ""
        if isinstance(error, StatusError) and error.code == GONE and self._stage != LIST:
            log.info("watch is too old, listing again", kind=self.resource.kind)
            return 0.0 if now - self._listed_at >= self._timing.healthy_after else self._backoff.next()
        self._outage.failed(self._stage, error)
        return max(self._backoff.next(), error.retry_after if isinstance(error, StatusError) else 0.0)

    # ---- list

    def _list(self, session: Connection) -> None:
        """Tell what is new or changed, then what is gone, then that this was all."""
        seen: set[NamespacedName] = set()
        first = not self.relists
        query = dict(self.resource.query) | {"limit": str(PAGE)}
        while True:
            try:
                page = parse_list(session.fetch(self.resource.path, query))
            except StatusError as error:
                if error.code != GONE or "continue" not in query:
                    raise
                seen.clear()
                query = dict(self.resource.query)  # in one piece, which cannot expire
                continue
            for raw in page.items:
                if name := self._observe(raw, _version(raw)):
                    seen.add(name)
            if self._stop.is_set():
                raise SourceError("stopped while listing")
            if not page.continue_token:
                break
            query["continue"] = page.continue_token
        for name in [name for name in self._known if name not in seen]:
            self._forget(name)
        if first and not seen and self.resource.absent:
            self._tell(self.resource.absent)
        self._resource_version = page.resource_version
        self._listed_at = self._clock()
        self._relist_at = self._listed_at + self._uniform(0.8, 1.2) * self._timing.relist_period
        self.relists += 1
        self._put(Synced(self.resource.kind))

    def _observe(self, raw: Any, version: str) -> NamespacedName | None:
        """Tell an object unless it is the one known. None where it has no name to know it by."""
        name = object_name(raw)
        if name is None or not version or self._known.get(name) != version:
            self._tell(self.resource.parse(raw))
        if name is not None:
            self._known[name] = version
        return name

    def _forget(self, name: NamespacedName) -> None:
        self._known.pop(name, None)
        self._tell(self.resource.gone(name))

    def _tell(self, event: Event) -> None:
        self.events += 1
        self._put(event)

    # ---- watch

    def _watch(self, session: Connection) -> None:
        """Until the server ends it, or the next list is due. Raises SourceError."""
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
                return  # timeoutSeconds is a wish: not every server ends a watch by then
        if self._clock() - self._opened_at < timing.early:
            raise SourceError(
                "the watch ended as soon as it began", "a proxy in between may not let it through"
            )
        self._outage.passed(STREAM)
        self._backoff.reset()

    def _handle(self, event: WatchEvent) -> None:
        if event.type in ("ADDED", "MODIFIED"):
            self._observe(event.object, event.resource_version)
        elif event.type == "DELETED":
            if name := object_name(event.object):
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
    """Whether the server says that this resourceVersion will not do, rather than not now or not you."""
    return 400 <= code < 500 and code not in (401, 403, 408, 429)


# ---- all kinds


class ApiSource:
    """One reflector, with a thread of its own, for each kind. `put` is called by all of these threads."""

    def __init__(self, access: Access, node_name: str, put: Callable[[Event], object]) -> None:
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        resources = (services(), endpoint_slices(), own_node(node_name))
        self.reflectors = tuple(
            Reflector(resource, access.session, put, self._stopping, access.timing) for resource in resources
        )

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set. It may run once.

        A reflector never ends because of the server. One that ends because of a fault of ours sets `stop`,
        and its exception is raised here: a proxy that follows two kinds of three must not live on.
        """
        threads = [
            threading.Thread(
                target=self._reflect, args=(one, stop), name=f"watch {one.resource.kind}", daemon=True
            )
            for one in self.reflectors
        ]
        for thread in threads:
            thread.start()
        stop.wait()
        self._stopping.set()
        deadline = time.monotonic() + 5
        for reflector, thread in zip(self.reflectors, threads, strict=True):
            while thread.is_alive() and time.monotonic() < deadline:
                reflector.abort()
                thread.join(0.05)
        if self._error:
            raise self._error

    def _reflect(self, reflector: Reflector, stop: threading.Event) -> None:
        try:
            reflector.run()
        except BaseException as error:  # not swallowed: run() raises it
            self._error = error
            stop.set()
