"""The API server as a source: configuration, credentials and connections for one reflector per kind.

The Kubernetes client provides configuration, authentication and transport. Its models and its Watch are not
used: they take a hundred times the memory, never back off, and one invalid object ends the stream. Only parts
of the client are imported (`client_modules`). `reflector` lists and watches.
"""

import contextlib
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ebpfproxy.api import client_modules
from ebpfproxy.api.connection import USUAL_TIMING, StatusError, Timing, WatchSilent
from ebpfproxy.api.event import Event
from ebpfproxy.api.parse import parse_status_reason
from ebpfproxy.api.reflector import UNOBSERVED, Observer, Reflector
from ebpfproxy.api.requests import UNOBSERVED_REQUESTS, RequestObserver
from ebpfproxy.api.resource import (
    endpoint_slices,
    namespaces,
    own_node,
    peer_nodes,
    pods_of,
    service_cidrs,
    services,
)
from ebpfproxy.errors import ConfigError, SourceError
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, parse_address

log = Logger(__name__)

CREDENTIALS = "Cannot reload the credentials, keeping the last ones"
"""The token or certificate for the API server cannot be read. The previous one is used."""

_KEEPALIVE = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),  # ms; the same for a request without ACK
]
"""Socket options. A connection to an unreachable peer ends within a minute."""


def load_configuration(
    kubeconfig: str,
    master: str,
    timing: Timing = USUAL_TIMING,
    observer: RequestObserver = UNOBSERVED_REQUESTS,
) -> "Access":
    """Load the access to the API server from a kubeconfig file; if `kubeconfig` is "", from the pod.

    `master` overrides the server's URL. In a pod the default address is a ClusterIP, which only works once
    this agent serves it. Outside a pod, `master` without `kubeconfig` means access without credentials.

    `observer` is informed of each request. Raises ConfigError.
    """
    return Access(kubeconfig, master, timing, observer)


class Access:
    """Address and certificate of the API server, and the agent's credentials. Safe for threads.

    A new session reloads the files if they were read more than a minute ago. Tokens of service accounts
    expire after an hour, and the client reads the tokenFile of a kubeconfig only once.
    """

    def __init__(self, kubeconfig: str, master: str, timing: Timing, observer: RequestObserver) -> None:
        self._kubeconfig, self._master, self.timing = kubeconfig, master, timing
        self._observer = observer
        self._lock = threading.Lock()
        self._configuration = _read_configuration(kubeconfig, master)
        self._read_at = time.monotonic()
        self.server: str = master or self._configuration.host
        _check_server(self.server, "--master: " if master else "")
        self.reached: Callable[[Address, int], object] = lambda _address, _port: None
        """Called with address and port of each new connection to the API server, in any thread."""

    @property
    def verifies(self) -> bool:
        """Whether the certificate of the API server is verified: without `insecure-skip-tls-verify`."""
        return bool(self._configuration.verify_ssl) or self.server.startswith("http:")

    def session(self) -> "Session":
        """Return a session with current credentials; with the previous ones if reloading fails."""
        with self._lock:
            if time.monotonic() - self._read_at >= self.timing.refresh:
                try:
                    self._configuration = _read_configuration(self._kubeconfig, self._master)
                    self.server = self._master or self._configuration.host
                except ConfigError as error:
                    log.warning(CREDENTIALS, reason=error.message)
                self._read_at = time.monotonic()
            return Session(self._configuration, self.server, self.timing, self._observer, self._connected)

    def _connected(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # ended already, or a link-local address
            host, port = connected.getpeername()[:2]
            self.reached(parse_address(host), port)


def _check_server(server: str, label: str) -> None:
    parts = urllib.parse.urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        hint = "write it as https://address:port; with the DaemonSet in deploy/, set api-server"
        raise ConfigError(f"{label}{server!r} is not the URL of an API server", hint)


def _read_configuration(kubeconfig: str, master: str) -> Any:
    """A kubernetes.client.Configuration. Raises ConfigError."""
    client = client_modules.load()
    configuration = client.Configuration()
    try:
        if kubeconfig:
            with open(kubeconfig, "rb"):  # the client treats a missing file as an empty one
                client_modules.kube_config().load_kube_config(
                    kubeconfig, client_configuration=configuration, persist_config=False
                )
        elif not master or "KUBERNETES_SERVICE_HOST" in os.environ:
            client.load_incluster_config(configuration)
    except OSError as error:
        where = error.filename or kubeconfig
        hint = "correct --kubeconfig, or clientConnection.kubeconfig in the configuration file"
        raise ConfigError(f"cannot read {where}: {error.strerror}", hint) from None
    except Exception as error:  # the client raises YAML, key, type and Base64 errors for an invalid file
        reason = " ".join(str(error).split())
        if kubeconfig:
            raise ConfigError(
                f"cannot use kubeconfig {kubeconfig}: {reason}",
                "correct the file, or give another --kubeconfig",
            ) from None
        hint = "give --kubeconfig or --manifests, or run in a pod with a mounted service account token"
        if "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise ConfigError("cannot find the API server: not running in a pod", hint) from None
        raise ConfigError(f"cannot load the configuration of this pod: {reason}", hint) from None
    configuration.socket_options = _KEEPALIVE
    return configuration


class Session:
    """Requests of one thread, over one connection if the server keeps it open.

    Each session has its own connection pool, so that a new session uses changed certificates.
    """

    def __init__(
        self,
        configuration: Any,
        server: str,
        timing: Timing,
        observer: RequestObserver,
        reached: Callable[[socket.socket], object],
    ) -> None:
        import urllib3.exceptions

        self._configuration, self._server, self._timing = configuration, server.rstrip("/"), timing
        self._observer, self._host = observer, urllib.parse.urlsplit(server).netloc
        self._reached = reached
        try:
            self._pool = client_modules.load().RESTClientObject(configuration).pool_manager
        except (OSError, ValueError) as error:  # an invalid proxy URL, a missing certificate file
            raise SourceError(f"cannot connect to {self._server}: {error}") from None
        observer.transport_created()
        self._pool.pool_classes_by_scheme = _pools(self._connected)
        if not configuration.verify_ssl:  # the agent logs it once, not for each connection
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        self._response: Any = None
        self._socket: socket.socket | None = None
        self._silence = 0.0

    def _connected(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reached(connected)

    def fetch(self, path: str, query: Mapping[str, str]) -> bytes:
        """Return the body of an answer. Raises SourceError; StatusError for an error answer."""
        return self._complete("GET", f"{path}?{urllib.parse.urlencode(query)}")

    def create(self, path: str, body: bytes) -> None:
        """Create an object, given as JSON. Raises SourceError; StatusError for an error answer."""
        self._complete("POST", path, body)

    def merge(self, path: str, body: bytes) -> None:
        """Change an object by a JSON merge patch (RFC 7396). Raises SourceError; StatusError for an error
        answer."""
        self._complete("PATCH", path, body, "application/merge-patch+json")

    def _complete(
        self, method: str, path: str, body: bytes = b"", content_type: str = "application/json"
    ) -> bytes:
        began = time.monotonic()
        with _converted_errors(self._server):
            answer: bytes = self._request(method, path, body, content_type).data
        self._observer.completed(method, self._host, time.monotonic() - began, len(body), len(answer))
        return answer

    def open(self, path: str, query: Mapping[str, str], silence: float) -> Iterator[bytes]:
        """Send the request and yield the chunks of its endless answer.

        More than `silence` seconds without a byte raise WatchSilent. Raises SourceError at once or while
        reading.
        """
        with _converted_errors(self._server):
            self._response = self._request("GET", f"{path}?{urllib.parse.urlencode(query)}")
            self.limit_silence(silence)
        return self._chunks()

    def limit_silence(self, seconds: float) -> None:
        """Change how long the open stream may be silent. Call it in the thread that reads the stream."""
        self._silence = seconds
        if self._socket:
            self._socket.settimeout(seconds)

    def _chunks(self) -> Iterator[bytes]:
        import urllib3.exceptions

        with _converted_errors(self._server):
            try:
                # Not `stream`: without chunked encoding it waits for a full buffer.
                while chunk := self._response.read1(1 << 16):
                    yield chunk
            except (urllib3.exceptions.ReadTimeoutError, TimeoutError):
                raise WatchSilent(
                    f"cannot read the watch: nothing received for {self._silence:g} s",
                    "check for a proxy or firewall that drops idle connections",
                ) from None

    def _request(
        self, method: str, path: str, body: bytes = b"", content_type: str = "application/json"
    ) -> Any:
        import urllib3

        if self._response:  # a stream that was given up; its connection cannot be used again
            self._response.close()
        headers = {"Accept": "application/json", "User-Agent": "ebpfproxy"} | self._credentials()
        try:
            response = self._pool.request(
                method,
                f"{self._server}{path}",
                body=body or None,
                headers=headers | ({"Content-Type": content_type} if body else {}),
                timeout=urllib3.Timeout(connect=self._timing.connect, read=self._timing.answer),
                preload_content=False,
                retries=False,  # nor redirects: the token must not go to another host
            )
        except Exception:
            self._observer.requested(method, self._host, None)
            raise
        self._observer.requested(method, self._host, response.status)
        if not 200 <= response.status < 300:
            raise _status_error(response)
        return response

    def _credentials(self) -> dict[str, str]:
        """Return the authentication headers. The client's hooks renew an expired token."""
        settings = self._configuration.auth_settings().values()
        return {each["key"]: each["value"].strip() for each in settings if each["value"]}

    def abort(self) -> None:
        """End a stream from another thread: its reader gets an error."""
        if self._socket:
            with contextlib.suppress(OSError):
                # Not SSLSocket.shutdown: it removes the TLS state that the reader still uses.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket = None
        if self._response:
            self._response.close()
        self._pool.clear()


def _pools(connected: Callable[[socket.socket], None]) -> dict[str, type]:
    """Return the classes of connection pools by scheme. They report the socket of each new connection.

    The socket cannot be taken from a response: if this has the header `Connection: close`, the library has
    detached it already, and a watch could be neither aborted nor limited.
    """
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
    from urllib3.connection import HTTPConnection, HTTPSConnection

    class Plain(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            if self.sock:
                connected(self.sock)

    class Encrypted(HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            if self.sock:
                connected(self.sock)

    class PlainPool(HTTPConnectionPool):
        ConnectionCls = Plain

    class EncryptedPool(HTTPSConnectionPool):
        ConnectionCls = Encrypted

    return {"http": PlainPool, "https": EncryptedPool}


@contextlib.contextmanager
def _converted_errors(server: str) -> Iterator[None]:
    """Convert exceptions of the transport to SourceError."""
    import urllib3.exceptions

    try:
        yield
    except urllib3.exceptions.SSLError as error:
        raise SourceError(
            f"cannot verify the certificate of {server}: {error}",
            "check that the certificate authority of the kubeconfig or pod issued it for this address",
        ) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise SourceError(f"cannot reach {server}: {error}", _hint(server)) from None
    except (ValueError, client_modules.load().ConfigException) as error:
        raise SourceError(f"cannot get credentials for {server}: {error}") from None


def _hint(server: str) -> str:
    if urllib.parse.urlsplit(server).hostname == os.environ.get("KUBERNETES_SERVICE_HOST", "").strip("[]"):
        return "this is a ClusterIP: give an address of the API server with --master that needs no proxy"
    return "check that the API server runs, and that this node has a route to it"


def _status_error(response: Any) -> StatusError:
    """Return the error for an answer without status 200. Its body may be a Status or anything else."""
    message = parse_status_reason(response.data)[1] or response.reason or "no reason given"
    seconds = response.headers.get("Retry-After", "")
    return StatusError(response.status, message, min(float(seconds), 600.0) if seconds.isdecimal() else 0.0)


class ApiSource:
    """A reflector for each kind, each with its own thread. These threads call `put` and the observer."""

    def __init__(
        self,
        access: Access,
        node_name: str,
        put: Callable[[Event], object],
        observer: Observer = UNOBSERVED,
        *,
        pods: bool = False,
        annotations: bool = False,
        peers: bool = False,
    ) -> None:
        """`pods`: whether to watch the pods of the node; `annotations`: them and all Namespaces; `peers`: all
        Nodes.

        `node_name` is "" if this machine is no node.
        """
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        resources = [services(), endpoint_slices()]
        if node_name:
            resources += [own_node(node_name), service_cidrs()]
        if peers:
            resources.append(peer_nodes())
        if pods or annotations:
            resources.append(pods_of(node_name, optional=not pods))
        if annotations:
            resources.append(namespaces())
        self.reflectors = tuple(
            Reflector(resource, access.session, put, self._stopping, access.timing, observer)
            for resource in resources
        )

    def run(self, stop: threading.Event) -> None:
        """Run the reflectors until `stop` is set. Call it only once.

        Server errors never end a reflector. If a bug ends one, `stop` is set and its exception is raised
        here: the agent must not continue with only some of the kinds.
        """
        threads = [
            threading.Thread(
                target=self._reflect, args=(each, stop), name=f"watch {each.resource.kind}", daemon=True
            )
            for each in self.reflectors
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
        except BaseException as error:  # run() raises it
            self._error = error
            stop.set()
