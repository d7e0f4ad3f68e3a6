"""The HTTP servers of the agent, which answer from the start of the process, before a mode is selected."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

from ebpfproxy.config import Config, Loaded
from ebpfproxy.http import rebalancing, zpages
from ebpfproxy.http.health_check_node_port import ServiceHealthServer
from ebpfproxy.http.healthz import HealthPages, HealthServer, ProxierHealth
from ebpfproxy.http.metrics import Metrics, MetricsServer
from ebpfproxy.http.readiness import Readiness
from ebpfproxy.http.server import Listener, Request, Response
from ebpfproxy.model.cluster import Full
from ebpfproxy.model.counters import Report
from ebpfproxy.model.device import DeviceSide
from ebpfproxy.model.service import NamespacedName


class Shown(Protocol):
    """What the servers show of the mode in use (`active_mode.ActiveMode`). Any thread may call it."""

    @property
    def name(self) -> str: ...

    def report(self) -> Report: ...

    def bypassed(self) -> Collection[DeviceSide]: ...


class Front:
    """The servers, and the values that they show. It imports little, so that the servers start early."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        config = loaded.config
        self.health = ProxierHealth(config.sync_period)
        self.readiness = Readiness()
        self.metrics = Metrics(self._report, self._bypassed)
        self.metrics.external_ips(config.allow_external_ips)
        self.service_health = ServiceHealthServer(
            lambda: self.health.at(time.monotonic()).healthy, self._not_served
        )
        self.full: Full = {}
        """See `ClusterState.full`."""
        self._serving: Callable[[], Shown] | None = None
        self._report_checks: Callable[[Mapping[NamespacedName, str]], object] | None = None
        self._listeners = tuple(self._make_listeners(config))
        self.servers: Mapping[str, ServiceHealthServer | Listener] = {
            "service-health": self.service_health,
            **{each.name: each for each in self._listeners},
        }
        """All servers, by name."""

    def start(self) -> None:
        """Start all servers. Raises ConfigError with --bind-address-hard-fail."""
        for server in self.servers.values():
            server.start()

    @property
    def failures(self) -> Mapping[str, str]:
        """Why servers could not listen at their start, by name."""
        return {each.name: each.start_failure for each in self._listeners if each.start_failure}

    def show(
        self,
        serving: Callable[[], Shown],
        report_checks: Callable[[Mapping[NamespacedName, str]], object],
    ) -> None:
        """Show the mode that `serving` returns from now on.

        `report_checks` is called in any thread, with the reasons why healthCheckNodePorts are not served.
        """
        self._serving, self._report_checks = serving, report_checks

    def _not_served(self, reasons: Mapping[NamespacedName, str]) -> None:
        if self._report_checks:
            self._report_checks(reasons)

    def _make_listeners(self, config: Config) -> Iterator[Listener]:
        hard = config.bind_address_hard_fail
        health = HealthPages(
            self.health, self.metrics, self._bypassed, readiness=self.readiness, mode=self._mode
        )
        if config.healthz_listen:
            yield HealthServer(config.healthz_listen, health, hard)
        if config.metrics_listen:
            listen = config.metrics_listen
            yield MetricsServer(
                listen, self.metrics, self._mode, hard, page=self._page, ready=health.response
            )

    def _page(self, request: Request) -> Response | None:
        if request.path == rebalancing.PATH:
            return Response(200, rebalancing.encode(self.full), {"Content-Type": "application/json"})
        return zpages.page(request, self._loaded)

    def _mode(self) -> str:
        return self._serving().name if self._serving else ""

    def _report(self) -> Report:
        return self._serving().report() if self._serving else Report()

    def _bypassed(self) -> Collection[DeviceSide]:
        return self._serving().bypassed() if self._serving else ()
