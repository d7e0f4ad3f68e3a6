"""A small API server for labs: Services, EndpointSlices, ServiceCIDRs, Nodes; HTTP without credentials.

It implements what an agent and kube-proxy need (KEP-3157, kubernetes.io, "Kubernetes API Concepts"): lists,
streaming lists, which continue as watches, watches from a version, bookmarks, single objects without a
namespace, and writes with PUT. The history has the last changes; a watch from before them expires (410) and
lists again. Watches do not end. Of selectors, only metadata.name is known; others are ignored: put only
objects that the agent selects.
"""

import collections
import contextlib
import http.client
import http.server
import json
import os
import queue
import socketserver
import threading
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.lab.manifests import Object
from ebpfproxy.lab.netns import Call
from ebpfproxy.lab.pod import Pod
from ebpfproxy.linux.netns import netns

PORT = 6443
URL = f"http://127.0.0.1:{PORT}"
"""Its address for the agent on the same node."""

_BOOKMARK_INTERVAL = 60.0
_HISTORY = 1000
"""The number of changes from which a watch can continue."""
_KINDS = {
    "/api/v1/services": ("Service", "v1"),
    "/apis/discovery.k8s.io/v1/endpointslices": ("EndpointSlice", "discovery.k8s.io/v1"),
    "/apis/networking.k8s.io/v1/servicecidrs": ("ServiceCIDR", "networking.k8s.io/v1"),
    "/api/v1/nodes": ("Node", "v1"),
}
_END_OF_LIST = {"k8s.io/initial-events-end": "true"}


def start(node: Pod, folder: Path, *objects: Object, address: str = "127.0.0.1") -> Call[None]:
    """Serve `objects`, and those of all JSON files in `folder`, in the network namespace of a node.

    It listens on `address`. Returns once it listens. It runs until the lab ends.
    """

    def child(ready: int) -> None:
        server = ApiServer((address, PORT), [*objects, *read_folder(folder)])
        os.write(ready, b"!")
        os.close(ready)
        server.serve_forever()

    return node.start_until_ready(child)


def read_folder(folder: Path) -> Iterator[Object]:
    """Yield the objects of all JSON files in the folder. A List counts as its items."""
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_bytes())
        yield from content["items"] if content["kind"] == "List" else [content]


class Writer:
    """Puts objects to the API server of a node, from any network namespace, in one process and thread."""

    def __init__(self, node: Pod) -> None:
        self._node = node
        self._connection: http.client.HTTPConnection | None = None

    def put(self, value: Object) -> None:
        """Create or replace an object. Returns when the server has answered. Raises OSError."""
        if self._connection is None:
            with netns.entered(self._node.netns):
                self._connection = connected("127.0.0.1", PORT)
        put(self._connection, value)


def connected(address: str, port: int) -> http.client.HTTPConnection:
    """Return an open connection to an API server of a lab. Raises OSError."""
    connection = http.client.HTTPConnection(address, port, timeout=10.0)
    connection.connect()  # sets TCP_NODELAY
    return connection


def put(connection: http.client.HTTPConnection, value: Object) -> None:
    """Create or replace an object. Returns when the server has answered. Raises OSError."""
    path = next(path for path, (kind, _) in _KINDS.items() if kind == value["kind"])
    connection.request("PUT", path, json.dumps(value, separators=(",", ":")))
    answer = connection.getresponse()
    answer.read()
    if answer.status != http.HTTPStatus.OK:
        raise OSError(f"the API server of the lab answered {answer.status} to PUT {path}")


class _Change(NamedTuple):
    """The event of a change, and the version after it."""

    version: int
    kind: str
    name: str
    event: bytes


class _Store:
    """The objects, encoded, and the queues of the open watches. Safe for threads."""

    def __init__(self, objects: Iterable[Object]) -> None:
        self._lock = threading.Lock()
        self._version = 1000
        self._history: collections.deque[_Change] = collections.deque(maxlen=_HISTORY)
        self._objects: dict[str, dict[tuple[str, str], bytes]] = {kind: {} for kind, _ in _KINDS.values()}
        self._watches: dict[str, set[tuple[str, queue.SimpleQueue[bytes]]]] = {
            kind: set() for kind, _ in _KINDS.values()
        }  # with the selected name, "" for all
        for value in objects:
            self.put(value)

    def put(self, value: Object) -> None:
        """Create or replace an object, and send it to all watches."""
        metadata = value["metadata"]
        key = metadata.get("namespace", ""), metadata["name"]
        kind = value["kind"]
        with self._lock:
            self._version += 1
            metadata["resourceVersion"] = str(self._version)
            metadata.setdefault("uid", f"00000000-0000-4000-8000-{self._version:012d}")
            encoded = json.dumps(value, separators=(",", ":")).encode()
            change = "MODIFIED" if key in self._objects[kind] else "ADDED"
            self._objects[kind][key] = encoded
            event = _event(change, encoded)
            self._history.append(_Change(self._version, kind, key[1], event))
            for selected, watch in self._watches[kind]:
                if selected in ("", key[1]):
                    watch.put(event)

    def one(self, kind: str, name: str) -> bytes | None:
        """Return an object without a namespace; None if it does not exist."""
        with self._lock:
            return self._objects[kind].get(("", name))

    def listed(self, kind: str, api_version: str, selected: str = "") -> bytes:
        """Return an ordinary list of all objects of `kind`; with `selected`, of those with this name."""
        with self._lock:
            head = {"kind": f"{kind}List", "apiVersion": api_version}
            metadata = {"metadata": {"resourceVersion": str(self._version)}}
            items = b",".join(self._selected(kind, selected))
        return json.dumps(head | metadata).encode()[:-1] + b',"items":[' + items + b"]}"

    @contextlib.contextmanager
    def watched(
        self, kind: str, api_version: str, since: int | None, selected: str = ""
    ) -> Iterator[tuple[list[bytes] | None, "queue.SimpleQueue[bytes]"]]:
        """Yield the first events, and the queue of the events after them.

        The first events are those of a streaming list, or with `since` the changes after this version; None
        if the history does not have all of them.
        """
        events: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with self._lock:
            if since is None:
                initial: list[bytes] | None = self._listed_as_events(kind, api_version, selected)
            else:
                initial = self._after(kind, since, selected)
            if initial is not None:
                self._watches[kind].add((selected, events))
        try:
            yield initial, events
        finally:
            with self._lock:
                self._watches[kind].discard((selected, events))

    def _selected(self, kind: str, selected: str) -> list[bytes]:
        return [each for (_, name), each in self._objects[kind].items() if selected in ("", name)]

    def _listed_as_events(self, kind: str, api_version: str, selected: str) -> list[bytes]:
        added = [_event("ADDED", encoded) for encoded in self._selected(kind, selected)]
        return [*added, self._bookmark(kind, api_version, _END_OF_LIST)]

    def _after(self, kind: str, version: int, selected: str) -> list[bytes] | None:
        if not self._history or version < self._history[0].version - 1:
            return None
        return [
            each.event
            for each in self._history
            if each.kind == kind and each.version > version and selected in ("", each.name)
        ]

    def bookmark(self, kind: str, api_version: str) -> bytes:
        with self._lock:
            return self._bookmark(kind, api_version, {})

    def _bookmark(self, kind: str, api_version: str, annotations: dict[str, str]) -> bytes:
        metadata = {"resourceVersion": str(self._version), "annotations": annotations}
        return _event(
            "BOOKMARK",
            json.dumps({"kind": kind, "apiVersion": api_version, "metadata": metadata}).encode(),
        )


def _event(change: str, encoded: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (change.encode(), encoded)


class ApiServer(socketserver.ThreadingTCPServer):
    """Listens on an IPv4 address and port. `serve_forever` answers requests."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], objects: Iterable[Object]) -> None:
        self.store = _Store(objects)
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected, such as killed agents."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ApiServer

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        if parts.path not in _KINDS:
            self._send_one(*parts.path.rpartition("/")[::2])
            return
        field, _, name = query.get("fieldSelector", "").partition("=")
        selected = name if field == "metadata.name" else ""
        if query.get("watch") not in ("1", "true"):
            self._send(http.HTTPStatus.OK, self.server.store.listed(*_KINDS[parts.path], selected))
        elif "sendInitialEvents" in query:
            self._watch(*_KINDS[parts.path], None, selected)
        else:
            self._watch(*_KINDS[parts.path], int(query.get("resourceVersion") or 0), selected)

    def _send_one(self, path: str, name: str) -> None:
        found = self.server.store.one(_KINDS[path][0], name) if path in _KINDS else None
        if found is None:
            self._send_failure(http.HTTPStatus.NOT_FOUND, "NotFound")
        else:
            self._send(http.HTTPStatus.OK, found)

    def _send_failure(self, code: http.HTTPStatus, reason: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        self._send(code, json.dumps(status).encode())

    def do_PUT(self) -> None:
        self.server.store.put(json.loads(self._body()))
        self._send(http.HTTPStatus.OK, b"{}")

    def do_POST(self) -> None:
        """Accept an Event of the agent and discard it."""
        self._body()
        self._send(http.HTTPStatus.CREATED, b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _send(self, status: http.HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self, kind: str, api_version: str, since: int | None, selected: str) -> None:
        """Send events until the client disconnects. `since` is the version to continue from; None: list."""
        with self.server.store.watched(kind, api_version, since, selected) as (initial, events):
            if initial is None:
                self._send_failure(http.HTTPStatus.GONE, "Expired")
                return
            self.send_response(http.HTTPStatus.OK)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if initial:
                self._send_chunk(b"".join(initial))
            while True:
                try:
                    line = events.get(timeout=_BOOKMARK_INTERVAL)
                except queue.Empty:
                    line = self.server.store.bookmark(kind, api_version)
                self._send_chunk(line)

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
