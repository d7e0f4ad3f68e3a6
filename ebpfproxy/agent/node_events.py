"""Events of the Node, as kube-proxy creates them (birthCry and Run in cmd/kube-proxy/app/server.go).

`kubectl describe node` shows them. An Event cannot be important: if it cannot be created, one line is logged.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.log import Logger

log = Logger(__name__)

NOT_CREATED = "Cannot create an Event of the Node, continuing without it"
"""The ClusterRole in `deploy/base` has the permission. Nothing depends on Events."""

PATH = "/apis/events.k8s.io/v1/namespaces/default/events"
"""Events of objects without a namespace are in the namespace default."""

_CONTROLLER = "ebpfproxy"
_LONGEST_NOTE = 1000  # characters; the API server rejects a note of more than 1 kB


class Creator(Protocol):
    """Access to the API server (`api.watch.Session`)."""

    def create(self, path: str, body: bytes) -> None: ...

    def close(self) -> None: ...


class Report(NamedTuple):
    """What an Event of the Node says. `note` has details, "" if there are none."""

    reason: str
    note: str = ""

    @property
    def type(self) -> str:
        return "Warning" if self.note else "Normal"


STARTING = Report("Starting")

FAILED_SERVERS = {"healthz": "FailedToStartProxierHealthcheck", "metrics": "FailedToStartMetricServer"}
"""Reasons of Events, by the name of the HTTP server whose address could not be bound at the start."""


def fallback(mode: str, unavailable: Mapping[str, str]) -> list[Report]:
    """Return a report if `auto` prefers other modes to `mode`, with the reasons why they are unavailable.

    >>> fallback("ebpf", {})
    []
    """
    reasons = "; ".join(f"{name} is unavailable: {reason}" for name, reason in unavailable.items())
    note = f"uses proxy mode {mode}: {reasons}"
    return [Report("ProxyModeFallback", note[:_LONGEST_NOTE])] if reasons else []


def event(node_name: str, moment: float, report: Report) -> dict[str, Any]:
    """Return the Event of the Node at the Unix time `moment`, in seconds.

    As in kube-proxy, the UID of the Node is its name: `kubectl describe node` looks for both.
    """
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{node_name}.{round(moment * 1e9):x}", "namespace": "default"},
        "eventTime": datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": _CONTROLLER,
        "reportingInstance": f"{_CONTROLLER}-{os.uname().nodename}",
        "type": report.type,
        "reason": report.reason,
        "action": "StartKubeProxy",
        "note": report.note,
        "regarding": {"kind": "Node", "name": node_name, "uid": node_name},
    }


def create(node_name: str, session: Callable[[], Creator], reports: Sequence[Report]) -> None:
    """Create an Event for each report, at this moment. Log a failure, and omit the rest."""
    try:
        creator = session()
        try:
            for report in reports:
                creator.create(PATH, json.dumps(event(node_name, time.time(), report)).encode())
        finally:
            creator.close()
    except EbpfProxyError as failure:
        log.warning(NOT_CREATED, reason=failure.message)
