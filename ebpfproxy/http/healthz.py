"""Health of the agent, and the server that reports it: /healthz, /livez and /readyz on port 10256.

Status codes, headers and bodies are those of kube-proxy 1.33 and later
(pkg/proxy/healthcheck/proxy_health.go, KEP-3836). kube-proxy has no /readyz.
"""

import json
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ebpfproxy.http.metrics import Metrics
from ebpfproxy.http.readiness import Readiness
from ebpfproxy.http.server import Listener, Request, Response, not_found, plain
from ebpfproxy.model.address import Family
from ebpfproxy.model.device import DeviceSide

_HEADERS = {"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"}
_NEVER = "0001-01-01T00:00:00Z"  # Go's zero time


class _State(NamedTuple):
    updated: float | None = None
    pending_since: float | None = None
    eligible: bool = True


class Health(NamedTuple):
    """Health at one moment. `updated` is the time of the last successful sync, None before the first."""

    healthy: bool
    updated: float | None
    eligible: bool


class ProxierHealth:
    """Whether changes reach the kernel. Times are seconds of the monotonic clock.

    Healthy means that no change has waited for twice `period` (the sync period) or longer. So the agent is
    healthy at its start, and while nothing changes. The control thread writes and any thread reads: the state
    is one immutable value that is replaced.
    """

    def __init__(self, period: float) -> None:
        self.set_period(period)
        self._state = _State()

    def set_period(self, period: float) -> None:
        """Set the sync period, in seconds."""
        self._timeout = 2 * period

    def queued(self, now: float) -> None:
        """Record that a change waits for a sync. The oldest change counts."""
        if self._state.pending_since is None:
            self._state = self._state._replace(pending_since=now)

    def updated(self, now: float) -> None:
        """Record a successful sync of all changes that were queued before."""
        self._state = self._state._replace(updated=now, pending_since=None)

    @property
    def has_synced(self) -> bool:
        """Whether a sync has succeeded."""
        return self._state.updated is not None

    def node_eligible(self, eligible: bool) -> None:
        """Record whether load balancers may send traffic to this node (`model.node.Node.eligible`)."""
        self._state = self._state._replace(eligible=eligible)

    def at(self, now: float) -> Health:
        """Return the health at the time `now`."""
        state = self._state
        waited = 0.0 if state.pending_since is None else now - state.pending_since
        return Health(waited < self._timeout, state.updated, state.eligible)


class HealthPages:
    """The responses about `health`, which are counted in `metrics`.

    - /healthz is for load balancers. It fails until the first successful sync, if changes do not reach the
      kernel, or if the node is not eligible for load balancers. kube-proxy does not serve it that early.
      The field `healthy` of its body does not depend on the node.
    - /livez is for the kubelet. It does not depend on the node: the kubelet must not restart the agent of a
      node that is being drained, nor an agent that starts or waits for the API server.
    - /readyz is for rollouts. It succeeds after the first successful sync. It fails while packets bypass the
      programs at a device. Its body lists each device where another program runs first, or where packets do
      not reach ebpfproxy's program. /readyz?verbose has one line for each check of `readiness` instead.
    """

    def __init__(
        self,
        health: ProxierHealth,
        metrics: Metrics,
        bypassed: Callable[[], Collection[DeviceSide]] = tuple,
        readiness: Readiness | None = None,
        mode: Callable[[], str] = str,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._health = health
        self._bypassed = bypassed
        self._readiness = readiness or Readiness()
        self._mode = mode
        self._counts: dict[str, Callable[[int], object]] = {  # kube-proxy counts only the first two
            "/healthz": metrics.healthz,
            "/livez": metrics.livez,
            "/readyz": lambda code: None,
        }
        self._monotonic = monotonic
        self._wall = wall

    def response(self, request: Request) -> Response:
        """Return the response; 404 for another path. Any thread may call it."""
        count = self._counts.get(request.path)
        if count is None:
            return not_found()
        now, wall = self._monotonic(), self._wall()
        health = self._health.at(now)
        healthy = health.healthy and (health.updated is not None or request.path == "/livez")
        sides = self._bypassed() if request.path == "/readyz" else ()
        if request.path == "/readyz" and "verbose" in request.query:
            return self._verbose(health, sides, now)
        healthy = healthy and not any(each.is_bypassed for each in sides)
        ok = healthy and (health.eligible or request.path != "/healthz")
        current = _rfc3339(wall)
        updated = _NEVER if health.updated is None else _rfc3339(wall - (now - health.updated))
        # As in kube-proxy, a healthy agent was updated "now", even if nothing has changed for days.
        body: dict[str, Any] = {"lastUpdated": current if ok else updated, "currentTime": current}
        if request.path == "/healthz":
            body["nodeEligible"] = health.eligible
        body["healthy"] = healthy
        if health.updated is not None:  # one sync programs both families
            of_family = {"lastUpdated": updated, "healthy": health.healthy}
            body["status"] = {family.value: of_family for family in Family}
        if sides:
            body["devices"] = [_side_values(each) for each in sides]
        code = 200 if ok else 503
        count(code)
        return Response(code, json.dumps(body, separators=(",", ":")).encode(), _HEADERS)

    def _verbose(self, health: Health, sides: Collection[DeviceSide], now: float) -> Response:
        """The checks, one line for each, in the form of the API server's /readyz?verbose."""
        checks = self._readiness.checks(self._mode(), health.updated is not None, health.healthy, sides, now)
        ready = all(each.ok for each in checks)
        lines = [*map(str, checks), f"readyz check {'passed' if ready else 'failed'}"]
        return plain(200 if ready else 503, "\n".join(lines))


class HealthServer(Listener):
    """Serves `pages` on `address`."""

    def __init__(
        self,
        address: tuple[str, int],
        pages: HealthPages,
        hard_fail: bool = False,
        retry_seconds: float = 5.0,
    ) -> None:
        flag = "--healthz-bind-address"
        super().__init__("healthz", flag, address, pages.response, hard_fail, retry_seconds)


def _side_values(side: DeviceSide) -> dict[str, Any]:
    return {
        "device": side.device,
        "side": side.side,
        "position": side.position,
        "before": side.before,
        "contested": side.contested,
        "unreached": side.unreached,
    }


def _rfc3339(moment: float) -> str:
    """
    >>> _rfc3339(1_700_000_000.25)
    '2023-11-14T22:13:20.250000Z'
    """
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
