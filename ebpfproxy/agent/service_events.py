"""Warning Events of Services for their owners: `kubectl describe service`. They are about annotations that
exceed a bound, and about addresses that are not served.

A tenant can cause many. So each agent creates at most one a second, and leaves out those that would wait
behind many others.
"""

import queue
import threading
from collections.abc import Callable

from ebpfproxy.agent import api_events
from ebpfproxy.agent.protected_claims import RejectedClaim
from ebpfproxy.api.event import ServiceChanged
from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.log import Logger
from ebpfproxy.model.service import NamespacedName

log = Logger(__name__)

NOT_CREATED = "Cannot create an Event of a Service, continuing without it"
"""The ClusterRole in `deploy/base` has the permission. Nothing depends on Events. Logged once until one is
created."""

REASON = "AnnotationIgnored"
NOT_SERVED = "AddressNotServed"

_WAITING = 100
_MOST = 20  # Events of one Service: a tenant may change it again and again
_PAUSE_SECONDS = 1.0


class ServiceEvents:
    """Creates the Events in the thread that calls `run`. The other methods are for the control thread."""

    def __init__(
        self, node_name: str, session: Callable[[], api_events.Creator], pause: float = _PAUSE_SECONDS
    ) -> None:
        self._node_name = node_name
        self._session = session
        self._pause = pause
        self._reported: dict[NamespacedName, set[tuple[str, str]]] = {}  # UID and cause
        self._uids: dict[NamespacedName, str] = {}
        self._waiting: queue.Queue[api_events.Report] = queue.Queue(_WAITING)
        self._failed = False

    def seen(self, changed: ServiceChanged) -> None:
        """Report an annotation beyond a bound, once for each Service."""
        name = changed.name
        if changed.service is None:
            self._reported.pop(name, None)
            self._uids.pop(name, None)
            return
        if changed.uid:
            self._uids[name] = changed.uid
        if excess := changed.excess:
            note = f"annotation {excess.annotation} is ignored: {excess.reason}"
            self._report(name, excess.annotation, api_events.Report(REASON, note, name, "LoadBalance"))

    def rejected(self, claim: RejectedClaim) -> None:
        """Report an address that is not served, once for each frontend and reason."""
        name, frontend, why = claim
        note = f"{frontend} is not served: {why.meaning}"
        self._report(name, note, api_events.Report(NOT_SERVED, note, name, "Serve"))

    def _report(self, name: NamespacedName, cause: str, report: api_events.Report) -> None:
        uid = self._uids.get(name, "")
        causes = self._reported.setdefault(name, set())
        if (uid, cause) not in causes and len(causes) < _MOST and not self._waiting.full():
            causes.add((uid, cause))
            self._waiting.put(report._replace(uid=uid))

    def run(self, stop: threading.Event) -> None:
        """Create the Events until `stop` is set and another one was reported."""
        while True:
            report = self._waiting.get()
            if stop.is_set():
                return
            try:
                api_events.send(self._node_name, self._session, [report])
                self._failed = False
            except EbpfProxyError as failure:
                if not self._failed:
                    log.warning(NOT_CREATED, service=report.service, reason=failure.message)
                self._failed = True
            stop.wait(self._pause)
