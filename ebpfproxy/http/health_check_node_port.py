"""The server of healthCheckNodePorts, through which load balancers find nodes with endpoints of a Service.

Status codes, headers and bodies are those of kube-proxy (pkg/proxy/healthcheck/service_health.go). The status
is 200 if an endpoint on this node is ready and the agent is healthy, whether or not the node is eligible for
load balancers; else 503. Every path has the same response.
"""

import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ebpfproxy import threads
from ebpfproxy.http.connections import Connections
from ebpfproxy.http.server import Response, Server, not_found
from ebpfproxy.linux import descriptors
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family, family, format_address, format_endpoint
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.health_check_node_port import HealthCheck

log = Logger(__name__)

CHECK_NOT_LISTENING = "Cannot listen for health checks, retrying"
"""Another process uses the healthCheckNodePort. Logged once."""
CHECKS_LIMITED = "Too many healthCheckNodePorts for the limit of open files"
"""The ports of some Services are not served. Raise RLIMIT_NOFILE of the agent, in systemd with
LimitNOFILE=. Half of the limit is for these ports, each of which takes a socket for each family."""
CHECK_CONFLICT = "Services claim the same healthCheckNodePort"
"""The port is served for the Service `served`."""

_CONNECTIONS = 128  # of all ports together
_STOP_SECONDS = 2.0  # for the thread to end
_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_ListenAddress = tuple[Address, int]
"""The address and port of a listening socket."""


class ServiceHealthServer:
    """Serves the ports of all Services in one thread, and each connection in a thread of its own.

    The number of connections of all ports together is limited (`Connections`).

    Each family has separate sockets. A port that another process uses is logged once and retried every
    `retry_seconds`. A port that several Services claim is logged once. `healthy` is called at each request.

    `not_served` is called with each line that is logged about ports of Services: the reasons by Service. Any
    thread calls it.
    """

    def __init__(
        self,
        healthy: Callable[[], bool],
        not_served: Callable[[Mapping[NamespacedName, str]], object] = lambda reasons: None,
        retry_seconds: float = 5.0,
    ) -> None:
        self._healthy = healthy
        self._not_served = not_served
        self._retry_seconds = retry_seconds
        self._checks: Mapping[int, HealthCheck] = {}  # by port; replaced as a unit, like _wanted
        self._wanted: frozenset[_ListenAddress] = frozenset()
        self._servers: dict[_ListenAddress, Server] = {}
        self._reported: dict[_ListenAddress, str] = {}
        self._beyond = 0  # wanted, but beyond the limit of open files
        self._lost: frozenset[tuple[int, NamespacedName]] = frozenset()  # ports that other Services have
        self._connections = Connections(_CONNECTIONS)
        self._changed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serve in the background until `stop`."""
        self._thread = threads.start("service-health", self._run)

    def stop(self) -> None:
        """Stop listening. Responses in progress are completed. Does nothing if it was not started."""
        if self._thread:
            self._stopping = True
            os.eventfd_write(self._changed, 1)
            threads.join(self._thread, _STOP_SECONDS)
            self._thread = None

    def update(self, checks: Iterable[HealthCheck], addresses: Collection[Address]) -> None:
        """Serve exactly these checks at these addresses. An unspecified address means all of its family.

        If several Services have the same port, it is served for the first of them by name. Call it in the
        control thread.
        """
        by_port: dict[int, HealthCheck] = {}
        lost = set()
        for check in sorted(checks):
            if by_port.setdefault(check.port, check) is not check:
                lost.add((check.port, check.service))
        reasons = {}
        for port, service in sorted(lost - self._lost):
            served = by_port[port].service
            log.warning(CHECK_CONFLICT, port=port, served=str(served), rejected=str(service))
            reasons[service] = f"healthCheckNodePort {port} is that of Service {served}"
        if reasons:
            self._not_served(reasons)
        self._lost = frozenset(lost)
        self._checks = by_port
        wanted = frozenset((address, port) for address in addresses for port in by_port)
        if wanted != self._wanted:
            self._wanted = wanted
            os.eventfd_write(self._changed, 1)

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._changed, selectors.EVENT_READ)
                while not self._stopping:
                    complete = self._update_sockets(selector)
                    for key, _ in selector.select(None if complete else self._retry_seconds):
                        if isinstance(key.fileobj, Server):
                            key.fileobj.handle_request()
                        else:
                            os.eventfd_read(self._changed)
        finally:
            for server in self._servers.values():
                server.server_close()
            self._servers.clear()

    def _update_sockets(self, selector: selectors.BaseSelector) -> bool:
        """Listen at the wanted addresses only. Return whether all of them could be bound."""
        wanted = self._wanted
        for listen_address in self._servers.keys() - wanted:
            selector.unregister(self._servers[listen_address])
            self._servers.pop(listen_address).server_close()
        self._reported = {each: reason for each, reason in self._reported.items() if each in wanted}
        new = sorted(wanted - self._servers.keys())
        room = max(descriptors.limit() // 2 - len(self._servers), 0)
        reasons = self._report_beyond(new[room:])
        for listen_address in new[:room]:
            try:
                self._servers[listen_address] = self._listen(listen_address)
            except OSError as failure:
                reasons |= self._log_once(listen_address, failure.strerror or str(failure))
            else:
                self._reported.pop(listen_address, None)
                selector.register(self._servers[listen_address], selectors.EVENT_READ)
        if reasons:
            self._not_served(reasons)
        return not self._reported

    def _report_beyond(self, beyond: Sequence[_ListenAddress]) -> dict[NamespacedName, str]:
        """Return the reasons of the Services if they are reported now."""
        previous, self._beyond = self._beyond, len(beyond)
        if previous or not beyond:
            return {}
        limit = descriptors.limit()
        log.error(CHECKS_LIMITED, not_served=len(beyond), limit=limit)
        reason = f"too many healthCheckNodePorts for a limit of {limit} open files"
        checks = (self._checks.get(port) for _, port in beyond)
        return {check.service: reason for check in checks if check}

    def _listen(self, listen_address: _ListenAddress) -> Server:
        """Raises OSError."""
        address, port = listen_address
        return Server(
            _FAMILIES[family(address)],
            (format_address(address), port),
            lambda request: self._answer(port),
            self._connections,
            v6_only=True,
        )

    def _answer(self, port: int) -> Response:
        check = self._checks.get(port)
        if check is None:  # a connection that is older than the removal of the port
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

    def _log_once(self, listen_address: _ListenAddress, reason: str) -> dict[NamespacedName, str]:
        """Return the reason by its Service if it is reported now."""
        if self._reported.get(listen_address) == reason:
            return {}
        self._reported[listen_address] = reason
        address, port = listen_address
        check, place = self._checks.get(port), format_endpoint(address, port)
        log.error(
            CHECK_NOT_LISTENING,
            service=str(check.service) if check else "",
            address=place,
            error=reason,
            after=f"{self._retry_seconds:g}s",
        )
        return {check.service: f"cannot listen for health checks on {place}: {reason}"} if check else {}
