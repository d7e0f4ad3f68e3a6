"""An API server for tests and benchmarks: Services, EndpointSlices, ServiceCIDRs and Nodes, over TLS.

It implements what a reflector needs (kubernetes.io, "Kubernetes API Concepts"): streaming lists (KEP-3157),
lists from the watch cache, pages with continue tokens of one snapshot, selectors, chunked watches that report
an object which starts or stops to match as ADDED or DELETED, bookmarks, 410 Gone as a status and as an event,
504 for a version that the server does not have yet. Listed items have no kind and
apiVersion, watched ones do; a DELETED object has the resourceVersion of its deletion. Objects are stored
as encoded JSON, so that 20 000 of them are listed as fast as TLS allows. Clients can only create Events, and
change Nodes by JSON merge patches.

    python -m tests.support.apiserver --services 10000 --endpoints 10 --kubeconfig /tmp/kubeconfig
"""

import argparse
import base64
import bisect
import collections
import contextlib
import copy
import dataclasses
import http.server
import itertools
import pathlib
import re
import signal
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import trustme
import yaml

Object = Mapping[str, Any]
Key = tuple[str, str]

_RESOURCES = {
    "/api/v1/services": ("Service", "v1"),
    "/apis/discovery.k8s.io/v1/endpointslices": ("EndpointSlice", "discovery.k8s.io/v1"),
    "/apis/networking.k8s.io/v1/servicecidrs": ("ServiceCIDR", "networking.k8s.io/v1"),
    "/api/v1/nodes": ("Node", "v1"),
    "/api/v1/pods": ("Pod", "v1"),
}
_NODES = "/api/v1/nodes/"
_EVENTS = re.compile(r"/apis/events\.k8s\.io/v1/namespaces/([^/]+)/events")
_VERSIONS = dict(_RESOURCES.values())
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    415: "UnsupportedMediaType",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}
_CLUSTER_IP = "spec.clusterIP!="
_HISTORY = 100_000
"""The number of changes that are kept for starting watches. Older ones are compacted."""


class Request(NamedTuple):
    """`query`: the last value of each parameter; `token`: "" if none was sent.

    `verb`: the verb that a role must allow: list or watch for a GET of a collection.
    """

    path: str
    query: Mapping[str, str]
    token: str
    method: str = "GET"

    @property
    def watch(self) -> bool:
        return self.query.get("watch") in ("1", "true")

    @property
    def verb(self) -> str:
        if self.method == "GET" and self.path in _RESOURCES:
            return "watch" if self.watch else "list"
        return "create" if self.method == "POST" else self.method.lower()


class _Stored(NamedTuple):
    """`encoded` is the object without kind and apiVersion. `node`: that of a pod; `cluster_ip`: that of a
    Service; else ""."""

    key: Key
    labels: Mapping[str, str]
    node: str
    cluster_ip: str
    encoded: bytes


class _Change(NamedTuple):
    resource_version: int
    kind: str
    old: _Stored | None
    new: _Stored | None


@dataclasses.dataclass(eq=False)
class _Watcher:
    """`lines` are events to send, encoded; None ends the stream."""

    kind: str
    match: Callable[[_Stored], bool]
    lines: collections.deque[bytes | None] = dataclasses.field(default_factory=collections.deque)
    frozen: bool = False


@dataclasses.dataclass
class _Failure:
    times: int
    status: int
    headers: dict[str, str]
    match: Callable[[Request], bool]


def _status(code: int, message: str) -> bytes:
    reason = _REASONS.get(code, "Unknown")
    head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return msgspec.json.encode(head | {"message": message, "reason": reason, "code": code})


def _too_large(version: str, current: int) -> bytes:
    return _status(504, f"Timeout: Too large resource version: {version}, current: {current}")


def _event(kind: str, type: str, encoded: bytes) -> bytes:
    head = f'{{"type":"{type}","object":{{"kind":"{kind}","apiVersion":"{_VERSIONS[kind]}",'
    return head.encode() + encoded[1:] + b"}\n"


def _error(code: int, message: str) -> bytes:
    return b'{"type":"ERROR","object":' + _status(code, message) + b"}\n"


def _at(stored: _Stored, resource_version: int) -> bytes:
    """The unchanged object with another resourceVersion."""
    value = msgspec.json.decode(stored.encoded)
    value["metadata"]["resourceVersion"] = str(resource_version)
    return msgspec.json.encode(value)


def _requirement(term: str) -> Callable[[_Stored], bool]:
    """One term of a label selector: ``!key``, ``key``, ``key=value``, ``key!=value``."""
    if "!=" in term:
        key, value = term.split("!=")
        return lambda stored: stored.labels.get(key) != value
    if "=" in term:
        key, value = term.replace("==", "=").split("=")
        return lambda stored: stored.labels.get(key) == value
    if term.startswith("!"):
        return lambda stored: term[1:] not in stored.labels
    return lambda stored: term in stored.labels


def _field(term: str) -> Callable[[_Stored], bool]:
    """``metadata.name=x``, ``metadata.namespace=x``, ``spec.nodeName=x`` or ``spec.clusterIP!=x``; raises
    ValueError for others."""
    if term.startswith(_CLUSTER_IP):
        return lambda stored: stored.cluster_ip != term.removeprefix(_CLUSTER_IP)
    place, _, value = term.replace("==", "=").partition("=")
    if place == "spec.nodeName":
        return lambda stored: stored.node == value
    index = ("metadata.namespace", "metadata.name").index(place)
    return lambda stored: stored.key[index] == value


def _matcher(query: Mapping[str, str]) -> Callable[[_Stored], bool]:
    labels = [_requirement(term) for term in query.get("labelSelector", "").split(",") if term]
    fields = [_field(term) for term in query.get("fieldSelector", "").split(",") if term]
    tests = labels + fields
    return lambda stored: all(test(stored) for test in tests)


def _line(change: _Change, match: Callable[[_Stored], bool]) -> bytes | None:
    """The line that a watch with this selector sends for a change; None for no line."""
    old = change.old if change.old and match(change.old) else None
    new = change.new if change.new and match(change.new) else None
    if new:
        return _event(change.kind, "MODIFIED" if old else "ADDED", new.encoded)
    return _event(change.kind, "DELETED", _at(old, change.resource_version)) if old else None


class ApiServer:
    """Listens on 127.0.0.1 while the context is entered; each connection has its own thread.

    Settings, which may be changed at any time: `token` (None admits everyone), `delay` (seconds before each
    answer), `bookmark_every` (seconds), `close_watches` (a watch ends as soon as it was accepted),
    `gone_as_status` (a watch from before the compaction gets HTTP 410 instead of an ERROR event),
    `chunk` (the largest HTTP chunk of a watch in bytes, 0 for one per event), `before` (called with each
    request before it is answered; may block), `streaming_lists` ("served", "rejected" as without the feature
    gate WatchList, "ignored" as by a server that does not know the parameters, "failing" as with etcd 3.4),
    `service_fields` (False: as before Kubernetes 1.31, Services have no field selector for spec.clusterIP),
    `watch_cache` (False: every list has pages), `close_connections` (after each answer, announced by
    `Connection: close`), `chunked` (False: the end of the connection ends a watch), `break_streams_after`
    (close the connection of a watch after this number of events).
    """

    def __init__(self, port: int = 0, token: str | None = "secret") -> None:
        self.port = port
        self.token = token
        self.delay = 0.0
        self.bookmark_every = 60.0
        self.close_watches = False
        self.gone_as_status = False
        self.chunk = 0
        self.streaming_lists = "served"
        self.service_fields = True
        self.watch_cache = True
        self.close_connections = False
        self.chunked = True
        self.break_streams_after: int | None = None
        self.before: Callable[[Request], None] = lambda request: None
        self.requests: list[Request] = []
        self.events: list[Any] = []
        self.authority = trustme.CA()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("127.0.0.1", "localhost").configure_cert(self._context)
        self._changed = threading.Condition(threading.RLock())
        self._version = 1000
        self._compacted = 0
        self._objects: dict[str, dict[Key, _Stored]] = {kind: {} for kind in _VERSIONS}
        self._history: list[_Change] = []
        self._snapshots: dict[str, tuple[int, list[_Stored]]] = {}
        self._tokens = itertools.count(1)
        self._watchers: set[_Watcher] = set()
        self._failures: list[_Failure] = []
        self._listeners: list[socket.socket] = []
        self._connections: set[socket.socket] = set()

    def __enter__(self) -> "ApiServer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    # ---- objects

    def put(self, value: Object) -> int:
        """Create or replace an object; returns its resourceVersion."""
        with self._changed:
            self._store(value)
            self._changed.notify_all()
            return self._version

    def load(self, values: Iterable[Object]) -> None:
        """Put many objects at once."""
        with self._changed:
            for value in values:
                self._store(value)
            self._changed.notify_all()

    def delete(self, kind: str, namespace: str, name: str) -> None:
        with self._changed:
            self._version += 1
            old = self._objects[kind].pop((namespace, name))
            self._notify(_Change(self._version, kind, old, None))
            self._changed.notify_all()

    def annotations(self, node: str) -> Mapping[str, str]:
        """The annotations of a Node."""
        with self._changed:
            stored = msgspec.json.decode(self._objects["Node"]["", node].encoded)
        return stored["metadata"].get("annotations") or {}

    def lose(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object without an event for watches, as a stale server does."""
        with self._changed:
            self._version += 1
            del self._objects[kind][namespace, name]

    def rewind(self, versions: int) -> None:
        """Take the version back, as after the restoration of an older etcd. Objects keep their versions."""
        with self._changed:
            self._version -= versions
            self._history.clear()

    def compact(self) -> None:
        """Discard all changes: a watch that starts before this version gets 410. Running ones continue."""
        with self._changed:
            self._compacted = self._version
            self._history.clear()

    def _store(self, value: Object) -> None:
        self._version += 1
        kind, metadata = value["kind"], dict(value["metadata"])
        key = (metadata.get("namespace", ""), metadata["name"])
        metadata["resourceVersion"] = str(self._version)
        metadata.setdefault("uid", f"00000000-0000-4000-8000-{self._version:012d}")
        body = {"metadata": metadata} | {
            field: content
            for field, content in value.items()
            if field not in ("kind", "apiVersion", "metadata")
        }
        labels, spec = dict(metadata.get("labels") or {}), value.get("spec", {})
        node, cluster_ip = spec.get("nodeName", ""), spec.get("clusterIP") or ""
        stored = _Stored(key, labels, node, cluster_ip, msgspec.json.encode(body))
        old = self._objects[kind].get(key)
        self._objects[kind][key] = stored
        self._notify(_Change(self._version, kind, old, stored))

    def _notify(self, change: _Change) -> None:
        self._history.append(change)
        if len(self._history) > _HISTORY:
            self._compacted = self._history[_HISTORY // 10].resource_version
            del self._history[: _HISTORY // 10 + 1]
        for watcher in self._watchers:
            if watcher.kind == change.kind and (line := _line(change, watcher.match)):
                watcher.lines.append(line)

    # ---- faults

    def start(self) -> None:
        """Listen, on the same port as before. Each network namespace can have a listener."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = listener.getsockname()[1]
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections and drop those that exist; the objects stay."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            listener.close()
        self.drop_connections()

    def drop_connections(self) -> None:
        with self._changed:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.end_watches()

    def end_watches(self) -> None:
        """End all watches, as a server does after timeoutSeconds."""
        self.inject(None)

    def fail(
        self,
        times: int,
        status: int,
        headers: Mapping[str, str] | None = None,
        match: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        """Answer the next `times` matching requests with this status."""
        with self._changed:
            self._failures.append(_Failure(times, status, dict(headers or {}), match))

    def fail_nothing(self) -> None:
        """End all failures of `fail`."""
        with self._changed:
            self._failures.clear()

    def expire_continue_tokens(self) -> None:
        with self._changed:
            self._snapshots.clear()

    def freeze(self) -> None:
        """Send nothing more on the present watches, and keep their connections."""
        with self._changed:
            for watcher in self._watchers:
                watcher.frozen = True
            self._watchers.clear()

    def bookmark(self) -> None:
        """Send a bookmark to every watch now."""
        with self._changed:
            for watcher in self._watchers:
                watcher.lines.append(self._bookmark(watcher.kind))
            self._changed.notify_all()

    def inject(self, line: bytes | None, kind: str | None = None) -> None:
        """Send raw bytes on every watch (of one kind); None ends them."""
        with self._changed:
            for watcher in self._watchers:
                if kind in (None, watcher.kind):
                    watcher.lines.append(line)
            self._changed.notify_all()

    def watches(self, kind: str) -> int:
        """How many watches of `kind` are open."""
        with self._changed:
            return sum(watcher.kind == kind for watcher in self._watchers)

    # ---- clients' files

    def write_kubeconfig(
        self, path: pathlib.Path | str, token_file: pathlib.Path | None = None, ca: bytes | None = None
    ) -> None:
        """A kubeconfig with the token itself, or with a tokenFile; `ca` replaces the right authority."""
        authority = ca or self.authority.cert_pem.bytes()
        cluster = {
            "server": self.url,
            "certificate-authority-data": base64.b64encode(authority).decode(),
        }
        user = {"tokenFile": str(token_file)} if token_file else {"token": self.token} if self.token else {}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        pathlib.Path(path).write_text(yaml.safe_dump(config))

    # ---- connections

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(connection, address), daemon=True).start()

    def _converse(self, plain: socket.socket, address: object) -> None:
        with contextlib.suppress(OSError), plain:  # the client, or a setting, closed the connection
            connection = self._context.wrap_socket(plain, server_side=True)
            with self._changed:
                self._connections.add(connection)
            try:
                if self._listeners:
                    _Handler(connection, address, self)  # type: ignore[arg-type]  # uses nothing of a BaseServer
            finally:
                with self._changed:
                    self._connections.discard(connection)
                connection.close()

    def answer(self, handler: "_Handler") -> None:
        parts = urllib.parse.urlsplit(handler.path)
        token = handler.headers.get("Authorization", "").partition(" ")[2]
        query = dict(urllib.parse.parse_qsl(parts.query))
        request = Request(parts.path, query, token, handler.command)
        self.requests.append(request)
        self.before(request)
        time.sleep(self.delay)
        if failure := self._failure(request):
            handler.send(failure.status, _status(failure.status, "injected failure"), failure.headers)
        elif self.token is not None and request.token != self.token:
            handler.send(401, _status(401, "Unauthorized"))
        elif request.method == "POST" and (found := _EVENTS.fullmatch(request.path)):
            created = handler.body()
            if created["metadata"]["namespace"] != found[1]:
                handler.send(400, _status(400, "the namespace of the object does not match the URL"))
                return
            if any(each["metadata"] == created["metadata"] for each in self.events):
                handler.send(409, _status(409, "the Event already exists"))
                return
            self.events.append(created)
            handler.send(201, b"{}")
        elif request.method == "PATCH" and request.path.startswith(_NODES):
            handler.send(*self._merge(handler, request.path.removeprefix(_NODES)))
        elif request.method != "GET":
            handler.send(405, _status(405, "nothing can be written here"), {"Connection": "close"})
        elif request.path not in _RESOURCES:
            handler.send(404, _status(404, "the server could not find the requested resource"))
        elif not request.query.get("resourceVersion", "0").isdecimal():
            handler.send(400, _status(400, "resourceVersion: Invalid value"))
        elif not self.service_fields and _CLUSTER_IP in request.query.get("fieldSelector", ""):
            handler.send(400, _status(400, '"spec.clusterIP" is not a known field selector'))
        elif request.watch:
            self._watch(handler, _RESOURCES[request.path][0], request.query)
        else:
            handler.send(*self._list(_RESOURCES[request.path], request.query))

    def _merge(self, handler: "_Handler", name: str) -> tuple[int, bytes]:
        patch = handler.body()
        if handler.headers["Content-Type"] != "application/merge-patch+json":
            return 415, _status(415, "the media type is not supported")
        with self._changed:
            stored = self._objects["Node"].get(("", name))
            if stored is None:
                return 404, _status(404, f'nodes "{name}" not found')
            self.put({"kind": "Node"} | merged(msgspec.json.decode(stored.encoded), patch))
        return 200, b"{}"

    def _failure(self, request: Request) -> _Failure | None:
        with self._changed:
            for failure in self._failures:
                if failure.times and failure.match(request):
                    failure.times -= 1
                    return failure
        return None

    # ---- list

    def _list(self, resource: tuple[str, str], query: Mapping[str, str]) -> tuple[int, bytes]:
        kind, version = resource
        limit = int(query.get("limit", "0"))
        least = query.get("resourceVersion", "")
        if least == "0" and self.watch_cache:
            limit = 0  # as in cacher.go, GetList
        with self._changed:
            if int(least or 0) > self._version:
                return 504, _too_large(least, self._version)
            if resume := query.get("continue"):
                name, _, start = resume.partition(".")
                if name not in self._snapshots:
                    return 410, _status(410, "The provided continue parameter is too old")
                resource_version, found = self._snapshots[name]
            else:
                match = _matcher(query)
                objects = self._objects[kind]
                found = [objects[key] for key in sorted(objects) if match(objects[key])]
                name, start, resource_version = str(next(self._tokens)), "0", self._version
            end = int(start) + limit if limit else len(found)
            metadata: dict[str, object] = {"resourceVersion": str(resource_version)}
            if end < len(found):
                self._snapshots[name] = (resource_version, found)
                metadata["continue"] = f"{name}.{end}"
                if not query.keys() & {"labelSelector", "fieldSelector"}:
                    metadata["remainingItemCount"] = len(found) - end
        head = msgspec.json.encode({"kind": kind + "List", "apiVersion": version, "metadata": metadata})
        items = b",".join(stored.encoded for stored in found[int(start) : end])
        return 200, head[:-1] + b',"items":[' + items + b"]}\n"

    # ---- watch

    def _watch(self, handler: "_Handler", kind: str, query: Mapping[str, str]) -> None:
        with self._changed:
            watcher = _Watcher(kind, _matcher(query))
            start = int(query.get("resourceVersion") or 0)
            streaming = "sendInitialEvents" in query and self.streaming_lists == "served"
            if reason := self._rejected(query):
                handler.send(422, _status(422, reason))
                return
            if "sendInitialEvents" in query and self.streaming_lists == "failing":
                handler.send(500, _status(500, "RequestWatchProgress is disabled"))
                return
            if streaming and start > self._version:
                handler.send(504, _too_large(str(start), self._version))
                return
            gone = not streaming and 0 < start < self._compacted
            if streaming:
                watcher.lines.extend(self._since(0, watcher))
                watcher.lines.append(self._bookmark(kind, {"k8s.io/initial-events-end": "true"}))
                self._watchers.add(watcher)
            elif not gone:
                watcher.lines.extend(self._since(start, watcher))
                self._watchers.add(watcher)
        try:
            if gone and self.gone_as_status:
                handler.send(410, _status(410, f"too old resource version: {start} ({self._compacted})"))
                return
            handler.start_stream()
            if gone:
                handler.send_chunk(_error(410, f"too old resource version: {start} ({self._compacted})"))
            elif not self.close_watches:
                deadline = time.monotonic() + float(query.get("timeoutSeconds", "1800"))
                events = self._lines(watcher, deadline, "allowWatchBookmarks" in query)
                for sent, line in enumerate(events, 1):
                    handler.send_event(line, self.chunk)
                    if sent == self.break_streams_after:
                        raise ConnectionAbortedError
            handler.send_chunk(b"")
        finally:
            with self._changed:
                self._watchers.discard(watcher)

    def _rejected(self, query: Mapping[str, str]) -> str:
        """Why the options of a watch are invalid, as in validation.go, validateWatchOptions; "" if valid."""
        if self.streaming_lists == "ignored":
            return ""
        match = query.get("resourceVersionMatch")
        if "sendInitialEvents" not in query:
            return "resourceVersionMatch: Forbidden: forbidden for watch" if match else ""
        if match != "NotOlderThan":
            return "resourceVersionMatch: Forbidden: sendInitialEvents requires NotOlderThan"
        if self.streaming_lists == "rejected":
            return "sendInitialEvents: Forbidden: forbidden unless the WatchList feature gate is enabled"
        return ""

    def _since(self, start: int, watcher: _Watcher) -> Iterator[bytes]:
        if not start:
            matching = (stored for stored in self._objects[watcher.kind].values() if watcher.match(stored))
            yield from (_event(watcher.kind, "ADDED", stored.encoded) for stored in matching)
            return
        first = bisect.bisect_right(self._history, start, key=lambda change: change.resource_version)
        for change in itertools.islice(self._history, first, None):
            if change.kind == watcher.kind and (line := _line(change, watcher.match)):
                yield line

    def _lines(self, watcher: _Watcher, deadline: float, bookmarks: bool) -> Iterator[bytes]:
        """Events as they occur and bookmarks in between, until the deadline or None in the queue."""
        bookmark = time.monotonic() + self.bookmark_every
        while (now := time.monotonic()) < deadline:
            with self._changed:
                self._changed.wait_for(lambda: watcher.lines, max(0, min(deadline, bookmark) - now))
                lines = list(watcher.lines)
                watcher.lines.clear()
                if bookmarks and not lines and not watcher.frozen and time.monotonic() >= bookmark:
                    lines = [self._bookmark(watcher.kind)]
            if time.monotonic() >= bookmark:
                bookmark += self.bookmark_every
            for line in lines:
                if line is None:
                    return
                yield line

    def _bookmark(self, kind: str, annotations: Mapping[str, str] | None = None) -> bytes:
        metadata: dict[str, object] = {"resourceVersion": str(self._version), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        return _event(kind, "BOOKMARK", msgspec.json.encode({"metadata": metadata, "spec": {}}))


def merged(target: Any, patch: Any) -> Any:
    """Return `target` changed by a JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection. `server` is the ApiServer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 0

    @property
    def _api(self) -> ApiServer:
        api: Any = self.server
        assert isinstance(api, ApiServer)
        return api

    def do_GET(self) -> None:
        self._api.answer(self)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: `ApiServer.requests` has all requests."""

    def send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self._announce_close()
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> Any:
        """The JSON in the request. Raises ConnectionAbortedError if the client ended before it sent all."""
        length = int(self.headers["Content-Length"])
        received = self.rfile.read(length)
        if len(received) < length:
            raise ConnectionAbortedError
        return msgspec.json.decode(received)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if self._api.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self._announce_close()
        self.end_headers()

    def _announce_close(self) -> None:
        if self._api.close_connections or not self._api.chunked:
            self.send_header("Connection", "close")  # also ends this handler

    def send_event(self, line: bytes, size: int) -> None:
        for start in range(0, len(line), size or len(line)):
            self.send_chunk(line[start : start + (size or len(line))])

    def send_chunk(self, data: bytes) -> None:
        """Send a chunk; an empty one ends the stream."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if self._api.chunked else data)


# ---- objects to serve


def make_service(name: str, namespace: str = "default", **fields: Any) -> dict[str, Any]:
    """A ClusterIP Service; `fields` are fields of spec, except for `labels`."""
    labels = fields.pop("labels", {})
    cluster_ip = fields.pop("clusterIP", "10.96.0.10")
    spec = {
        "clusterIP": cluster_ip,
        "clusterIPs": [cluster_ip],
        "ipFamilies": ["IPv4"],
        "ipFamilyPolicy": "SingleStack",
        "internalTrafficPolicy": "Cluster",
        "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
        "selector": {"app": name},
        "sessionAffinity": "None",
        "type": "ClusterIP",
    }
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": spec | fields,
        "status": {"loadBalancer": {}},
    }


def make_endpoint(address: str, node: str = "node-0", **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": {"ready": True, "serving": True, "terminating": False} | conditions,
        "nodeName": node,
        "targetRef": {"kind": "Pod", "namespace": "default", "name": "pod-" + address.replace(".", "-")},
        "zone": "zone-a",
    }


def make_slice(
    name: str,
    service: str,
    endpoints: Iterable[Object] = (),
    namespace: str = "default",
    labels: Object | None = None,
) -> dict[str, Any]:
    """An IPv4 EndpointSlice with one port, "http" 8080/TCP."""
    metadata = {
        "name": name,
        "namespace": namespace,
        "generation": 1,
        "creationTimestamp": "2025-01-01T00:00:00Z",
        "labels": {
            "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            "kubernetes.io/service-name": service,
        }
        | dict(labels or {}),
        "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2025-01-01T00:00:00Z"},
        "managedFields": [copy.deepcopy(_MANAGED_FIELDS)],
    }
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": metadata,
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": list(endpoints),
    }


def make_node(name: str, zone: str = "zone-a") -> dict[str, Any]:
    return {
        "kind": "Node",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone},
        },
        "spec": {"podCIDR": "10.128.0.0/24"},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
    }


_MANAGED_FIELDS: Object = {
    "manager": "kube-controller-manager",
    "operation": "Update",
    "apiVersion": "discovery.k8s.io/v1",
    "time": "2025-01-01T00:00:00Z",
    "fieldsType": "FieldsV1",
    "fieldsV1": {
        "f:addressType": {},
        "f:endpoints": {},
        "f:metadata": {
            "f:annotations": {".": {}, "f:endpoints.kubernetes.io/last-change-trigger-time": {}},
            "f:generateName": {},
            "f:labels": {
                ".": {},
                "f:endpointslice.kubernetes.io/managed-by": {},
                "f:kubernetes.io/service-name": {},
            },
            "f:ownerReferences": {".": {}, 'k:{"uid":"00000000-0000-4000-8000-000000000000"}': {}},
        },
        "f:ports": {},
    },
}


def _dotted(number: int) -> str:
    return ".".join(str(octet) for octet in number.to_bytes(4))


def generate(services: int, endpoints: int) -> list[dict[str, Any]]:
    """Services in 10.96.0.0/12, each with `endpoints` endpoints in 10.128.0.0/9 on nodes node-0 to node-9.

    A slice has at most 100 endpoints, like those of the endpoint slice controller. Raises ValueError if there
    are not enough addresses.
    """
    first_service, first_endpoint = (10 << 24 | 96 << 16) + 256, (10 << 24 | 128 << 16) + 256
    if services >= 1 << 20 or services * endpoints >= 1 << 23:
        raise ValueError("more services or endpoints than there are addresses")
    objects = []
    for i in range(services):
        name, namespace = f"svc-{i:06d}", f"ns-{i % 50}"
        objects.append(make_service(name, namespace, clusterIP=_dotted(first_service + i)))
        for start in range(0, endpoints, 100):
            first = first_endpoint + i * endpoints
            numbers = range(start, min(start + 100, endpoints))
            of_slice = [make_endpoint(_dotted(first + j), f"node-{j % 10}") for j in numbers]
            objects.append(make_slice(f"{name}-{start // 100:03d}", name, of_slice, namespace))
    return objects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--services", type=int, default=0)
    parser.add_argument("--endpoints", type=int, default=0, help="of each service")
    parser.add_argument("--node", default="node-0", help="the Node that is served")
    parser.add_argument("--kubeconfig", required=True, help="written before it is ready")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with ApiServer(arguments.port) as server:
        server.load(generate(arguments.services, arguments.endpoints))
        server.put(make_node(arguments.node))
        server.write_kubeconfig(arguments.kubeconfig)
        print("ready", flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
