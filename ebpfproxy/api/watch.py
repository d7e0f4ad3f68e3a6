"""Services, EndpointSlices and our own Node from the API server: its address, credentials, connections.

The kubernetes client gives its configuration, authentication and transport; its models and its Watch are not
used (they cost a hundred times the memory, never back off, and one bad object ends the whole stream). It is
imported where the first configuration is loaded, not with this module: it takes 30 MB. What is asked of the
server, and what is made of its answers, is in `reflector`.
"""

import contextlib
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ebpfproxy.api.event import Event
from ebpfproxy.api.parse import parse_status_reason
from ebpfproxy.api.reflector import (
    UNOBSERVED,
    USUAL_TIMING,
    Observer,
    Reflector,
    StatusError,
    Timing,
    endpoint_slices,
    own_node,
    services,
)
from ebpfproxy.errors import ConfigError, SourceError
from ebpfproxy.log import Logger

log = Logger(__name__)

CREDENTIALS = "Cannot reload the credentials, keeping the last ones"
"""The token or certificate of the API server's configuration."""

_KEEPALIVE = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""A peer that has vanished is noticed within a minute."""


def load_configuration(kubeconfig: str, master: str, timing: Timing = USUAL_TIMING) -> "Access":
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
        _check_server(self.server, "--master: " if master else "")

    def session(self) -> "Session":
        """A session with the credentials of now; those of before where they cannot be read now."""
        with self._lock:
            if time.monotonic() - self._read_at >= self.timing.refresh:
                try:
                    self._configuration = _read_configuration(self._kubeconfig, self._master)
                    self.server = self._master or self._configuration.host
                except ConfigError as error:
                    log.warning(CREDENTIALS, reason=error.message)
                self._read_at = time.monotonic()
            return Session(self._configuration, self.server, self.timing)


def _check_server(server: str, label: str) -> None:
    parts = urllib.parse.urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        hint = "write it as https://address:port; of the DaemonSet in deploy/ it is api-server"
        raise ConfigError(f"{label}{server!r} is not the URL of an API server", hint)


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
        hint = "--kubeconfig, or clientConnection.kubeconfig in the configuration file, says where it is"
        raise ConfigError(f"{where} cannot be read: {error.strerror}", hint) from None
    except Exception as error:  # the client lets YAML, key, type and Base64 errors of a junk file through
        reason = " ".join(str(error).split())
        if kubeconfig:
            raise ConfigError(f"{kubeconfig} is no usable kubeconfig: {reason}") from None
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


# ---- all kinds


class ApiSource:
    """One reflector, with a thread of its own, for each kind. These threads call `put` and the observer."""

    def __init__(
        self,
        access: Access,
        node_name: str,
        put: Callable[[Event], object],
        observer: Observer = UNOBSERVED,
    ) -> None:
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        resources = (services(), endpoint_slices(), own_node(node_name))
        self.reflectors = tuple(
            Reflector(resource, access.session, put, self._stopping, access.timing, observer)
            for resource in resources
        )

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set. It may run once.

        A reflector never ends because of the server. One that ends because of a fault of ours sets `stop`,
        and its exception is raised here: a proxy that follows two kinds of three must not continue.
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
