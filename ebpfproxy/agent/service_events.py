"""Warning Events of Services whose annotations exceed a bound, for their owners: `kubectl describe service`.

A tenant can cause many. So each agent creates at most one a second, and leaves out those that would wait
behind many others.
"""

import queue
import threading
from collections.abc import Callable

from ebpfproxy.agent import api_events
from ebpfproxy.api.event import ServiceChanged
from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.log import Logger
from ebpfproxy.model.service import NamespacedName

log = Logger(__name__)

NOT_CREATED = "Cannot create an Event of a Service, continuing without it"
"""The ClusterRole in `deploy/base` has the permission. Nothing depends on Events. Logged once until one is
created."""

REASON = "AnnotationIgnored"

_WAITING = 100
_PAUSE_SECONDS = 1.0


class ServiceEvents:
    """Creates the Events in the thread that calls `run`. `seen` is for the control thread."""

    def __init__(
        self, node_name: str, session: Callable[[], api_events.Creator], pause: float = _PAUSE_SECONDS
    ) -> None:
        self._node_name = node_name
        self._session = session
        self._pause = pause
        self._reported: dict[NamespacedName, set[tuple[str, str]]] = {}  # UID and annotation
        self._waiting: queue.Queue[api_events.Report] = queue.Queue(_WAITING)
        self._failed = False

    def seen(self, changed: ServiceChanged) -> None:
        """Report an annotation beyond a bound, once for each Service."""
        if changed.service is None:
            self._reported.pop(changed.name, None)
        excess, uid = changed.excess, changed.uid
        if not excess:
            return
        causes = self._reported.setdefault(changed.name, set())
        if (uid, excess.annotation) not in causes and not self._waiting.full():
            causes.add((uid, excess.annotation))
            note = f"annotation {excess.annotation} is ignored: {excess.reason}"
            self._waiting.put(api_events.Report(REASON, note, changed.name, "LoadBalance", uid))

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
