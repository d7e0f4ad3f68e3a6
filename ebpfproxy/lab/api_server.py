"""A small API server for benchmarks: Services, EndpointSlices and one Node, over HTTP without credentials.

It implements what an agent needs (KEP-3157, kubernetes.io, "Kubernetes API Concepts"): streaming lists, which
continue as watches, bookmarks, and writes with PUT. It has no history, so every other watch expires (410) and
lists again. Watches do not end. Selectors are ignored: put only objects that the agent selects.
"""

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
from typing import Any

from ebpfproxy.lab.manifests import Object
from ebpfproxy.lab.netns import Call
from ebpfproxy.lab.pod import Pod
from ebpfproxy.linux.netns import netns

PORT = 6443
URL = f"http://127.0.0.1:{PORT}"
"""Its address for the agent on the same node."""

_BOOKMARK_INTERVAL = 60.0
_KINDS = {
    "/api/v1/services": ("Service", "v1"),
    "/apis/discovery.k8s.io/v1/endpointslices": ("EndpointSlice", "discovery.k8s.io/v1"),
    "/api/v1/nodes": ("Node", "v1"),
}
_END_OF_LIST = {"k8s.io/initial-events-end": "true"}


def start(node: Pod, folder: Path, *objects: Object) -> Call[None]:
    """Serve `objects`, and those of all JSON files in `folder`, in the network namespace of a node.

    Returns once it listens. It runs until the lab ends.
    """

    def child(ready: int) -> None:
        server = ApiServer(("127.0.0.1", PORT), [*objects, *read_folder(folder)])
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


class _Store:
    """The objects, encoded, and the queues of the open watches. Safe for threads."""

    def __init__(self, objects: Iterable[Object]) -> None:
        self._lock = threading.Lock()
        self._version = 1000
        self._objects: dict[str, dict[tuple[str, str], bytes]] = {kind: {} for kind, _ in _KINDS.values()}
        self._watches: dict[str, set[queue.SimpleQueue[bytes]]] = {kind: set() for kind, _ in _KINDS.values()}
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
            for watch in self._watches[kind]:
                watch.put(_event(change, encoded))

    def listed(self, kind: str, api_version: str) -> bytes:
        """Return an ordinary list of all objects of `kind`."""
        with self._lock:
            head = {"kind": f"{kind}List", "apiVersion": api_version}
            metadata = {"metadata": {"resourceVersion": str(self._version)}}
            items = b",".join(self._objects[kind].values())
        return json.dumps(head | metadata).encode()[:-1] + b',"items":[' + items + b"]}"

    @contextlib.contextmanager
    def watched(
        self, kind: str, api_version: str
    ) -> Iterator[tuple[list[bytes], "queue.SimpleQueue[bytes]"]]:
        """Yield the events of a streaming list, and the queue of the events after it."""
        events: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with self._lock:
            initial = [_event("ADDED", encoded) for encoded in self._objects[kind].values()]
            initial.append(self._bookmark(kind, api_version, _END_OF_LIST))
            self._watches[kind].add(events)
        try:
            yield initial, events
        finally:
            with self._lock:
                self._watches[kind].discard(events)

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
            self._send(http.HTTPStatus.NOT_FOUND, b"{}")
        elif query.get("watch") not in ("1", "true"):
            self._send(http.HTTPStatus.OK, self.server.store.listed(*_KINDS[parts.path]))
        elif "sendInitialEvents" in query:
            self._watch(*_KINDS[parts.path])
        else:
            status = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "Expired",
                "code": 410,
            }
            self._send(http.HTTPStatus.GONE, json.dumps(status).encode())

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

    def _watch(self, kind: str, api_version: str) -> None:
        """Send events until the client disconnects."""
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        store = self.server.store
        with store.watched(kind, api_version) as (initial, events):
            self._send_chunk(b"".join(initial))
            while True:
                try:
                    line = events.get(timeout=_BOOKMARK_INTERVAL)
                except queue.Empty:
                    line = store.bookmark(kind, api_version)
                self._send_chunk(line)

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
