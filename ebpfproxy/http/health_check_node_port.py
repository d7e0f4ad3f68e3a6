"""healthCheckNodePort: what load balancers ask a node, to learn whether a Service has endpoints there.

Codes, headers and bodies are those of kube-proxy (pkg/proxy/healthcheck/service_health.go): 200 where an
endpoint on this node is ready and the proxy is healthy, whatever becomes of the node; else 503. Any path.
"""

import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping

from ebpfproxy.http.server import Response, Server, not_found
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family, family, format_address, format_endpoint
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.health_check_node_port import HealthCheck

log = Logger(__name__)

CHECK_NOT_LISTENING = "Cannot listen for health checks, retrying"
"""Another process has the healthCheckNodePort. Logged once."""
CHECK_CONFLICT = "Services claim the same healthCheckNodePort"
"""`served` has it."""

_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_Place = tuple[Address, int]
"""Where a socket listens."""


class ServiceHealthServer:
    """One thread that waits at the ports of all Services, and one for each connection.

    Each family has sockets of its own. A port that is not to be had, since another process or another
    Service has it, is named once, and tried again every `retry_seconds`. `healthy` is asked at each request.
    """

    def __init__(self, healthy: Callable[[], bool], retry_seconds: float = 5.0) -> None:
        self._healthy = healthy
        self._retry_seconds = retry_seconds
        self._checks: Mapping[int, HealthCheck] = {}  # by port; replaced as a whole, as the next one is
        self._wanted: frozenset[_Place] = frozenset()
        self._servers: dict[_Place, Server] = {}
        self._reported: dict[_Place, str] = {}
        self._lost: frozenset[tuple[int, NamespacedName]] = frozenset()  # claims to ports that others have
        self._changed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Wait in the background until `stop`."""
        self._thread = threading.Thread(target=self._run, name="service-health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; answers under way end by themselves. Does nothing if it was not started."""
        if self._thread:
            self._stopping = True
            os.eventfd_write(self._changed, 1)
            self._thread.join()
            self._thread = None

    def tell(self, checks: Iterable[HealthCheck], addresses: Collection[Address]) -> None:
        """From now on these are asked about, at these addresses; unspecified ones are all of their family.

        Of Services that have one port the first by name has it. For the thread that owns the state.
        """
        by_port: dict[int, HealthCheck] = {}
        lost = set()
        for check in sorted(checks):
            if by_port.setdefault(check.port, check) is not check:
                lost.add((check.port, check.service))
        for port, service in sorted(lost - self._lost):
            log.warning(
                CHECK_CONFLICT,
                port=port,
                served=str(by_port[port].service),
                rejected=str(service),
            )
        self._lost = frozenset(lost)
        self._checks = by_port
        wanted = frozenset((address, port) for address in addresses for port in by_port)
        if wanted != self._wanted:
            self._wanted = wanted
            os.eventfd_write(self._changed, 1)

    def _run(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._changed, selectors.EVENT_READ)
            while not self._stopping:
                complete = self._arrange(waiting)
                for key, _ in waiting.select(None if complete else self._retry_seconds):
                    if isinstance(key.fileobj, Server):
                        key.fileobj.handle_request()
                    else:
                        os.eventfd_read(self._changed)
            for server in self._servers.values():
                server.server_close()
            self._servers.clear()

    def _arrange(self, waiting: selectors.BaseSelector) -> bool:
        """Listen where it is wanted, and nowhere else; whether that could be done."""
        wanted = self._wanted
        for place in self._servers.keys() - wanted:
            waiting.unregister(self._servers[place])
            self._servers.pop(place).server_close()
        self._reported = {place: reason for place, reason in self._reported.items() if place in wanted}
        for place in sorted(wanted - self._servers.keys()):
            try:
                self._servers[place] = self._listening(place)
            except OSError as failure:
                self._tell_once(place, failure.strerror or str(failure))
            else:
                self._reported.pop(place, None)
                waiting.register(self._servers[place], selectors.EVENT_READ)
        return wanted <= self._servers.keys()

    def _listening(self, place: _Place) -> Server:
        """Raises OSError."""
        address, port = place
        return Server(
            _FAMILIES[family(address)],
            (format_address(address), port),
            lambda request: self._answer(port),
            v6_only=True,
        )

    def _answer(self, port: int) -> Response:
        check = self._checks.get(port)
        if check is None:  # a connection that was there before the port was closed
            return not_found()
        healthy = self._healthy()
        body = {
            "service": {"namespace": check.service.namespace, "name": check.service.name},
            "localEndpoints": check.endpoints,
            "serviceProxyHealthy": healthy,
        }
        headers = {
            "Content-Type": "application/json",
            "X-Content-Type-Options": "nosniff",
            "X-Load-Balancing-Endpoint-Weight": str(check.endpoints),
        }
        code = 200 if healthy and check.endpoints else 503
        return Response(code, json.dumps(body, indent="\t").encode(), headers)

    def _tell_once(self, place: _Place, reason: str) -> None:
        if self._reported.get(place) == reason:
            return
        self._reported[place] = reason
        address, port = place
        check = self._checks.get(port)
        log.error(
            CHECK_NOT_LISTENING,
            service=str(check.service) if check else "",
            address=format_endpoint(address, port),
            error=reason,
            after=f"{self._retry_seconds:g}s",
        )
