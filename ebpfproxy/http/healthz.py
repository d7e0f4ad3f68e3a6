"""Health of the proxier, and the server that shows it: /healthz, /livez and /readyz on port 10256.

Codes, headers and bodies are those of kube-proxy (pkg/proxy/healthcheck/proxier_health.go, KEP-3836), which
has no /readyz.
"""

import json
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ebpfproxy.http import go_time
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.http.server import Listener, Request, Response, not_found
from ebpfproxy.model.device import DeviceSide

_HEADERS = {"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"}


class _State(NamedTuple):
    updated: float | None = None
    pending_since: float | None = None
    eligible: bool = True


class Health(NamedTuple):
    """What is so at one moment; `updated` is when the last sync ended well, None before the first."""

    healthy: bool
    updated: float | None
    eligible: bool


class ProxierHealth:
    """Whether changes reach the kernel. Times are seconds of a clock that never goes back.

    Healthy means that no change has waited for twice `period` (the sync period) or longer; so a cluster
    in which nothing changes is healthy, and so is a proxier that starts. The control thread writes,
    any thread reads: the state is one value, replaced as a whole.
    """

    def __init__(self, period: float) -> None:
        self.keep_to(period)
        self._state = _State()

    def keep_to(self, period: float) -> None:
        """From here on, this is the sync period."""
        self._timeout = 2 * period

    def queued(self, now: float) -> None:
        """A change waits to be synced; the oldest counts."""
        if self._state.pending_since is None:
            self._state = self._state._replace(pending_since=now)

    def updated(self, now: float) -> None:
        """A sync has ended well, with all changes queued so far."""
        self._state = self._state._replace(updated=now, pending_since=None)

    def node_eligible(self, eligible: bool) -> None:
        """Whether load balancers may send to this node (`model.node.Node.eligible`)."""
        self._state = self._state._replace(eligible=eligible)

    def at(self, now: float) -> Health:
        state = self._state
        waited = 0.0 if state.pending_since is None else now - state.pending_since
        return Health(waited < self._timeout, state.updated, state.eligible)


class HealthServer(Listener):
    """Serves `health` on `address`; counts the answers in `metrics`.

    /healthz is for load balancers and says no, too, where the node is to go away; /livez is for the
    kubelet, which must not kill the proxy of a node that is being drained, nor one that still waits for the
    API server. /readyz is for a rollout, which continues once this agent has brought something into the
    kernel. It fails, too, while packets bypass the programs at a device; its body lists each device where
    another program is first or packets do not reach the agent's.
    """

    def __init__(
        self,
        address: tuple[str, int],
        health: ProxierHealth,
        metrics: Metrics,
        hard_fail: bool = False,
        retry_seconds: float = 5.0,
        bypassed: Callable[[], Collection[DeviceSide]] = tuple,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__("healthz", "--healthz-bind-address", address, self._handle, hard_fail, retry_seconds)
        self._health = health
        self._bypassed = bypassed
        self._counts: dict[str, Callable[[int], object]] = {  # kube-proxy counts two of them
            "/healthz": metrics.healthz,
            "/livez": metrics.livez,
            "/readyz": lambda code: None,
        }
        self._monotonic = monotonic
        self._wall = wall
        self._began = monotonic()

    def _handle(self, request: Request) -> Response:
        count = self._counts.get(request.path)
        if count is None:
            return not_found()
        now, wall = self._monotonic(), self._wall()
        health = self._health.at(now)
        healthy = health.healthy and (health.eligible or request.path != "/healthz")
        sides = self._bypassed() if request.path == "/readyz" else ()
        if request.path == "/readyz":
            healthy = healthy and health.updated is not None and not any(each.is_bypassed for each in sides)
        # A healthy proxier was "updated" just now, even where nothing has changed for days.
        updated = self._shown(now if healthy else health.updated, now, wall)
        body = f'"lastUpdated": "{updated}","currentTime": "{self._shown(now, now, wall)}"'
        if request.path == "/healthz":
            body += f', "nodeEligible": {"true" if health.eligible else "false"}'
        if sides:
            body += f', "devices": {json.dumps([_shown_side(each) for each in sides])}'
        code = 200 if healthy else 503
        count(code)
        return Response(code, f"{{{body}}}".encode(), _HEADERS)

    def _shown(self, moment: float | None, now: float, wall: int) -> str:
        """A moment of the clock that never goes back, as wall time: `now` is `wall`."""
        if moment is None:
            return go_time.NEVER
        return go_time.format_moment(wall - round((now - moment) * 1e9), moment - self._began)


def _shown_side(side: DeviceSide) -> dict[str, Any]:
    return {
        "device": side.device,
        "side": side.side,
        "position": side.position,
        "before": side.before,
        "contested": side.contested,
        "unreached": side.unreached,
    }
