"""An API server with pods that `kubectl` lists and runs commands in.

A pod is a folder of programs on this machine: `kubectl exec` starts the command with this folder first in
PATH. The protocol is that of the API server: discovery, lists with selectors, and a WebSocket with the
subprotocol v5.channel.k8s.io (KEP-4006), in which the first byte of a message names its stream.
"""

import contextlib
import os
import pty
import select
import subprocess
import threading
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from websockets.datastructures import Headers
from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from tests.support.apiserver import ApiServer

_PROTOCOL = Subprotocol("v5.channel.k8s.io")
_STDOUT, _STDERR, _ERROR = 1, 2, 3
_CONNECTIONS_END = {"Connection": "close"}
_DISCOVERY: Mapping[str, Any] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": "pods",
                "singularName": "pod",
                "namespaced": True,
                "kind": "Pod",
                "verbs": ["get", "list"],
                "shortNames": ["po"],
            }
        ],
    },
}


class PodServer(ApiServer):
    """An `ApiServer` with pods of one namespace, kube-system. Change `pods` at any time.

    `folders`: by the name of a pod, the folder with its programs. `environment`: the variables of all
    containers. `executed`: pod, container and command of each exec.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pods: list[dict[str, Any]] = []
        self.folders: dict[str, Path] = {}
        self.environment: dict[str, str] = {}
        self.executed: list[tuple[str, str, list[str]]] = []

    def __enter__(self) -> "PodServer":
        self.start()
        return self

    def answer(self, handler: Any) -> None:
        url = urllib.parse.urlsplit(handler.path)
        query = urllib.parse.parse_qs(url.query)
        folder = "/api/v1/namespaces/kube-system/pods"
        authorized = handler.headers.get("Authorization") == f"Bearer {self.token}"
        if not authorized or not (url.path in _DISCOVERY or url.path.startswith(folder)):
            super().answer(handler)
            return
        name, _, action = url.path.removeprefix(folder).strip("/").partition("/")
        if url.path in _DISCOVERY:
            _send(handler, _DISCOVERY[url.path])
        elif not name:
            head = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
            _send(handler, head | {"items": [pod for pod in self.pods if _selected(pod, query)]})
        elif action == "exec":
            self._execute(handler, name, query)
        else:
            (pod,) = [pod for pod in self.pods if pod["metadata"]["name"] == name]
            _send(handler, pod)

    def _execute(self, handler: Any, name: str, query: Mapping[str, list[str]]) -> None:
        self.executed.append((name, query["container"][0], query["command"]))
        socket = _Socket(handler)
        environment = {"PATH": f"{self.folders[name]}:{os.environ['PATH']}"} | self.environment
        if query.get("tty", ["false"])[0] == "true":
            code = socket.run_on_terminal(query["command"], environment)
        else:
            code = socket.run(query["command"], environment)
        status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if code:
            cause = {"reason": "ExitCode", "message": str(code)}
            status = {
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": f"command terminated with non-zero exit code: exit status {code}",
                "details": {"causes": [cause]},
            }
        socket.send(_ERROR, msgspec.json.encode(status))
        socket.close()
        handler.close_connection = True


class _Socket:
    """The server's end of a WebSocket. `websockets` has the protocol, `handler` the connection."""

    def __init__(self, handler: Any) -> None:
        self._connection = handler.connection
        self._protocol = ServerProtocol(subprotocols=[_PROTOCOL])
        self._lock = threading.Lock()
        response = self._protocol.accept(Request(handler.path, Headers(list(handler.headers.items()))))
        self._protocol.send_response(response)
        self._flush()

    def run(self, command: list[str], environment: Mapping[str, str]) -> int:
        """Run the command and send its output. Return its exit code."""
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
        ) as process:
            assert process.stdout
            assert process.stderr
            pipes = {process.stdout.fileno(): _STDOUT, process.stderr.fileno(): _STDERR}
            while pipes:
                for end in select.select(list(pipes), [], [])[0]:
                    if piece := os.read(end, 4096):
                        self.send(pipes[end], piece)
                    else:
                        del pipes[end]
        return process.returncode

    def run_on_terminal(self, command: list[str], environment: Mapping[str, str]) -> int:
        master, slave = pty.openpty()
        with subprocess.Popen(
            ["setsid", "--ctty", *command], env=environment, stdin=slave, stdout=slave, stderr=slave
        ) as process:
            os.close(slave)
            with contextlib.suppress(OSError):  # the command has ended
                while piece := os.read(master, 4096):
                    self.send(_STDOUT, piece)
        os.close(master)
        return process.returncode

    def send(self, stream: int, data: bytes) -> None:
        with self._lock:
            self._protocol.send_binary(bytes([stream]) + data)
            self._flush()

    def close(self) -> None:
        """Send a close frame, and wait for that of the client."""
        with self._lock:
            self._protocol.send_close(1000)
            self._flush()
        while piece := self._connection.recv(4096):
            self._protocol.receive_data(piece)
            if any(event.opcode is Opcode.CLOSE for event in self._protocol.events_received()):  # type: ignore[union-attr]
                return

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._connection.sendall(data)


def make_pod(name: str, node: str, **status: Any) -> dict[str, Any]:
    """A pod of the DaemonSet, running and ready; `status` replaces fields of its status. Some fields of
    `metadata` and `spec` are missing."""
    ready = {"type": "Ready", "status": "True"}
    container = {"name": "ebpfproxy", "ready": True, "state": {"running": {}}}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "kube-system", "labels": {"k8s-app": "ebpfproxy"}},
        "spec": {"nodeName": node, "containers": [{"name": "ebpfproxy", "args": ["run"]}]},
        "status": {"phase": "Running", "conditions": [ready], "containerStatuses": [container]} | status,
    }


def _send(handler: Any, value: Any) -> None:
    handler.send(200, msgspec.json.encode(value), _CONNECTIONS_END)
    handler.close_connection = True


def _selected(pod: Mapping[str, Any], query: Mapping[str, list[str]]) -> bool:
    """Whether a pod has the labels, and is on the node, of the selectors."""
    labels = [term for term in query.get("labelSelector", [""])[0].split(",") if term]
    wanted = dict(term.split("=") for term in labels)
    (node,) = query.get("fieldSelector", [""])
    on_node = not node or node == f"spec.nodeName={pod['spec']['nodeName']}"
    return on_node and wanted.items() <= pod["metadata"]["labels"].items()
