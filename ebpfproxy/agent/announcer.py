"""The announcer: keeps the announcement of direct server return at this node's Node object up to date.

Other nodes tunnel packets to this node while its Node has the annotation. A thread writes it. It runs only
while the annotation differs from what this node accepts.
"""

import contextlib
import functools
import threading
from collections.abc import Callable

from ebpfproxy.api import announcement
from ebpfproxy.config import Config
from ebpfproxy.errors import ConfigError, EbpfProxyError, SourceError
from ebpfproxy.linux.netlink import geneve
from ebpfproxy.log import Logger
from ebpfproxy.model.node import Node
from ebpfproxy.plan.service_plan import Role

log = Logger(__name__)

ANNOUNCED = "Announced direct server return"
"""The Node object has the annotation `ebpfproxy/dsr-port`: other nodes may tunnel packets to this node."""
WITHDRAWN = "Withdrew the announcement of direct server return"
"""This node accepts no tunneled packets. The annotation `ebpfproxy/dsr-port` was removed from its Node."""
NOT_ANNOUNCED = "Cannot announce direct server return, retrying"
"""Other nodes translate packets to endpoints of this node instead of tunneling them. Logged once for each
reason, and retried every 30 s."""
NOT_WITHDRAWN = "Cannot withdraw the announcement of direct server return, retrying"
"""Other nodes may tunnel packets to this node, which are lost. Logged once for each reason, and retried every
30 s."""

_INTERVAL = 30.0  # seconds between two attempts


class Announcer:
    """Compares the annotation of the Node with what this node accepts. Any thread may call the methods."""

    def __init__(
        self,
        node_name: str,
        session: Callable[[], announcement.Merger] | None,
        interval: float = _INTERVAL,
    ) -> None:
        """`session` connects to the API server; None if manifests replace it, which operators annotate."""
        self._node_name = node_name
        self._session = session
        self._interval = interval
        self._changed = threading.Condition()
        self._wanted: int | None = None  # None: not known yet
        self._present: int | None = None  # None: not known, or there is no Node
        self._sightings = 0
        self._running = False
        self._reported = ""

    def accept(self, port: int) -> None:
        """Take the UDP port at which this node accepts tunneled packets; 0 if it accepts none."""
        with self._changed:
            self._wanted = port
            self._start()

    def seen(self, node: Node | None) -> None:
        """Take this node's Node as the API server reported it."""
        with self._changed:
            self._present = node.dsr_port if node else None
            self._sightings += 1
            self._start()

    def _start(self) -> None:
        self._changed.notify()
        if not self._running and self._difference() is not None:
            self._running = True
            threading.Thread(target=self._run, name="announcer", daemon=True).start()

    def _difference(self) -> int | None:
        """Return the port to announce, 0 to withdraw; None if nothing is to be changed."""
        if self._wanted is None or self._present is None or self._wanted == self._present:
            return None
        return self._wanted

    def _has_other(self, tried: int) -> bool:
        return self._difference() != tried

    def _run(self) -> None:
        while True:
            with self._changed:
                port, sightings = self._difference(), self._sightings
                if port is None:
                    self._running = False
                    return
            failure = self._write(port)
            with self._changed:
                if failure is None:
                    if sightings == self._sightings:  # else the Node may have been created again meanwhile
                        self._present = port
                    self._reported = ""
                    self._report_success(port)
                    continue
                self._report_failure(port, failure)
                self._changed.wait_for(functools.partial(self._has_other, port), self._interval)

    def _write(self, port: int) -> EbpfProxyError | None:
        """Return the failure, None after success."""
        if self._session is None:
            hint = f"change the annotation {announcement.DSR_PORT} of the Node in the manifests"
            return EbpfProxyError("the agent does not write manifests", hint)
        try:
            session = self._session()
            try:
                announcement.write(session, self._node_name, port)
            finally:
                session.close()
        except EbpfProxyError as failure:
            return failure
        except Exception as error:  # the thread must continue: nothing else would try again
            return EbpfProxyError(f"unexpected error: {error!r}")
        return None

    def _report_success(self, port: int) -> None:
        if port:
            log.info(ANNOUNCED, node=self._node_name, port=port)
        else:
            log.info(WITHDRAWN, node=self._node_name)

    def _report_failure(self, port: int, failure: EbpfProxyError) -> None:
        if failure.message == self._reported:
            return
        self._reported = failure.message
        if port:
            log.warning(NOT_ANNOUNCED, node=self._node_name, reason=failure.message, hint=failure.hint)
        else:
            log.warning(NOT_WITHDRAWN, node=self._node_name, reason=failure.message, hint=failure.hint)


def withdraw(config: Config, dry_run: bool) -> list[str]:
    """Remove the announcement of this node, if it has direct server return; return one line for what was
    removed.

    `dry_run`: only return the line. Raises EbpfProxyError with a remedy.
    """
    if config.role is Role.EDGE or config.manifests is not None or not geneve.find():
        return []
    from ebpfproxy.api.watch import load_configuration

    name = config.node_name
    try:
        access = load_configuration(str(config.kubeconfig or ""), config.master)
        with contextlib.closing(access.session()) as session:
            if not announcement.read(session, name):
                return []
            if not dry_run:
                announcement.write(session, name, 0)
    except (ConfigError, SourceError) as failure:
        message = f"cannot remove the annotation {announcement.DSR_PORT} of node {name}: {failure.message}"
        raise SourceError(message, f"run: {announcement.by_hand(name, 0)}") from None
    return [f"the annotation {announcement.DSR_PORT} of node {name}"]
