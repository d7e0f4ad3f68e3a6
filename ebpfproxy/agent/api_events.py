"""Events of the Node and of Services, as kube-proxy creates them.

The sources are cmd/kube-proxy/app/server.go, server_linux.go and pkg/proxy/healthcheck/service_health.go.
`kubectl describe` shows them. An Event cannot be important: if it cannot be created, one line is logged.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from ebpfproxy.api.connection import StatusError
from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.log import Logger
from ebpfproxy.model.service import NamespacedName

log = Logger(__name__)

NOT_CREATED = "Cannot create an Event, continuing without it"
"""The ClusterRole in `deploy/base` has the permission. Nothing depends on Events."""

_CONTROLLER = "ebpfproxy"
_LONGEST_NOTE = 1000  # characters; the API server rejects a note of more than 1 kB


class Creator(Protocol):
    """Access to the API server (`api.watch.Session`)."""

    def create(self, path: str, body: bytes) -> None: ...

    def close(self) -> None: ...


class Report(NamedTuple):
    """What an Event says about the Service, or about the Node. `note` has details, "" if there are none.

    `uid`: that of the Service, for an Event that does not depend on the node. The name of the Event depends
    only on the Service and the report then: the first node creates it, and the API server rejects those of
    others.
    """

    reason: str
    note: str = ""
    service: NamespacedName | None = None
    action: str = "StartKubeProxy"
    uid: str = ""

    @property
    def type(self) -> str:
        return "Warning" if self.note else "Normal"

    @property
    def path(self) -> str:
        """Where to create the Event."""
        return f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"

    @property
    def namespace(self) -> str:
        """Events of objects without a namespace are in the namespace default."""
        return self.service.namespace if self.service else "default"


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


def deprecation(mode: str) -> list[Report]:
    """Return a report if Kubernetes has deprecated the mode."""
    note = "Kubernetes has deprecated mode ipvs, and removes it from kube-proxy 1.43 (KEP-5495); use nftables"
    return [Report("IPVSDeprecation", note)] if mode == "ipvs" else []


def health_checks(node_name: str, reasons: Mapping[NamespacedName, str]) -> list[Report]:
    """Return a report for each Service whose healthCheckNodePort is not served, with the reason."""
    return [
        Report(
            "FailedToStartServiceHealthcheck",
            f"node {node_name}: {reason}"[:_LONGEST_NOTE],
            service,
            action="Listen",
        )
        for service, reason in reasons.items()
    ]


def event(node_name: str, moment: float, report: Report) -> dict[str, Any]:
    """Return the Event at the Unix time `moment`, in seconds.

    As in kube-proxy, the UID of the object is its name if it is not known: `kubectl describe node` looks for
    both.
    """
    name = report.service.name if report.service else node_name
    regarding = {"kind": "Node", "name": name, "uid": name}
    if report.service:
        uid = report.uid or str(report.service)
        in_namespace = {"namespace": report.service.namespace, "uid": uid}
        regarding |= {"kind": "Service"} | in_namespace
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{_suffix(moment, report)}", "namespace": report.namespace},
        "eventTime": datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": _CONTROLLER,
        "reportingInstance": f"{_CONTROLLER}-{os.uname().nodename}",
        "type": report.type,
        "reason": report.reason,
        "action": report.action,
        "note": report.note,
        "regarding": regarding,
    }


def _suffix(moment: float, report: Report) -> str:
    if not report.uid:
        return f"{round(moment * 1e9):x}"
    return hashlib.sha256("\0".join((report.uid, report.reason, report.note)).encode()).hexdigest()[:16]


def create(node_name: str, session: Callable[[], Creator], reports: Sequence[Report]) -> None:
    """Create an Event for each report, at this moment. Log a failure, and omit the rest."""
    try:
        send(node_name, session, reports)
    except EbpfProxyError as failure:
        log.warning(NOT_CREATED, reason=failure.message)


def send(node_name: str, session: Callable[[], Creator], reports: Sequence[Report]) -> None:
    """Create an Event for each report, at this moment. Raises EbpfProxyError, and omits the rest."""
    creator = session()
    try:
        for report in reports:
            try:
                creator.create(report.path, json.dumps(event(node_name, time.time(), report)).encode())
            except StatusError as rejected:
                if rejected.code != HTTPStatus.CONFLICT or not report.uid:  # another node has created it
                    raise
    finally:
        creator.close()
