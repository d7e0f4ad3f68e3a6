"""Events of the Node, as kube-proxy creates them (birthCry in cmd/kube-proxy/app/server.go).

`kubectl describe node` shows them. An Event cannot be important: if it cannot be created, one line is logged.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.log import Logger

log = Logger(__name__)

NOT_CREATED = "Cannot create an Event of the Node, continuing without it"
"""The ClusterRole in `deploy/base` has the permission. Nothing depends on Events."""

PATH = "/apis/events.k8s.io/v1/namespaces/default/events"
"""Events of objects without a namespace are in the namespace default."""

_CONTROLLER = "ebpfproxy"


class Creator(Protocol):
    """Access to the API server (`api.watch.Session`)."""

    def create(self, path: str, body: bytes) -> None: ...

    def close(self) -> None: ...


def starting(node_name: str, moment: float) -> dict[str, Any]:
    """Return the Event for the start of the agent at the Unix time `moment`, in seconds.

    As in kube-proxy, the UID of the Node is its name: `kubectl describe node` looks for both.
    """
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{node_name}.{round(moment * 1e9):x}", "namespace": "default"},
        "eventTime": datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": _CONTROLLER,
        "reportingInstance": f"{_CONTROLLER}-{os.uname().nodename}",
        "type": "Normal",
        "reason": "Starting",
        "action": "StartKubeProxy",
        "regarding": {"kind": "Node", "name": node_name, "uid": node_name},
    }


def report_start(node_name: str, session: Callable[[], Creator]) -> None:
    """Create the Event for a start at this moment. Log a failure."""
    try:
        creator = session()
        try:
            creator.create(PATH, json.dumps(starting(node_name, time.time())).encode())
        finally:
            creator.close()
    except EbpfProxyError as failure:
        log.warning(NOT_CREATED, reason=failure.message)
