"""Events of `monitor` as OpenTelemetry log records, which a thread sends to an OTLP receiver in batches.

An event is a log record with an event name, not a span: it is one point in time, and a span needs an end,
which the programs do not report.

Attributes follow the semantic conventions 1.44 of OpenTelemetry: client.*, server.*, network.*, k8s.* and
error.type. The side that begins the connection is known, so they are client.* and server.*, not source.* and
destination.*. Names without a convention begin with "ebpfproxy.".

It needs the packages of the extra `otlp`. Their API for logs is public but not declared stable. Only this
module uses it.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import click
import requests
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider, ReadableLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExportResult
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from ebpfproxy import __version__
from ebpfproxy.backends.ebpf.inspect.events import Event, Lost
from ebpfproxy.cli.monitor import describe
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import Family, family, format_address, parse_address, parse_endpoint

_SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
_FAILURES = frozenset({"rejected", "dropped", "reset"})
_QUEUE = 8192  # records; eight seconds of events at the default rate
_FLUSH_SECONDS = 3.0


class EventExporter:
    """Exports events until `close`.

    `url`: that of the receiver, without ``/v1/logs``. "": that of OTEL_EXPORTER_OTLP_ENDPOINT, or
    http://localhost:4318. The other variables OTEL_EXPORTER_OTLP_* have an effect, too.

    Raises ConfigError if the URL or a variable is invalid. An unreachable receiver is no error: the first
    failure prints a line to standard error, and `lost` counts the records.
    """

    def __init__(self, url: str) -> None:
        if url and not _is_http(url):
            raise ConfigError(f"--otlp: {url!r} is no URL of http or https", "write http://localhost:4318")
        # Otherwise Python prints what the library logs: each attempt to send each batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        try:
            self._sender = _Sender(f"{url.rstrip('/')}/v1/logs" if url else None)
            batches = BatchLogRecordProcessor(self._sender, max_queue_size=_QUEUE)
            self._provider = LoggerProvider(_resource(), shutdown_on_exit=False)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ConfigError(
                f"--otlp: {reason}", "correct the variables OTEL_* of the environment"
            ) from None
        self._provider.add_log_record_processor(batches)
        self._logger = self._provider.get_logger("ebpfproxy.monitor", __version__, _SCHEMA)
        self._queued = self._dropped = 0

    def event(self, event: Event) -> None:
        """Export an event. It does not wait."""
        self._emit(log_record(event))

    def missed(self, lost: Lost) -> None:
        """Export the number of events that were not recorded since the command started."""
        attributes = {f"ebpfproxy.lost.{name}": count for name, count in lost._asdict().items()}
        self._emit(
            LogRecord(
                timestamp=time.time_ns(),
                severity_number=SeverityNumber.WARN,
                body=f"events lost so far: {lost.rate} over the rate, {lost.buffer} for lack of room",
                attributes=attributes,
                event_name="ebpfproxy.events.lost",
            )
        )

    def _emit(self, record: LogRecord) -> None:
        # A full queue discards its oldest record without a count, so it never gets full.
        if self._queued - self._sender.taken >= _QUEUE:
            self._dropped += 1
            return
        self._queued += 1
        self._logger.emit(record)

    @property
    def lost(self) -> int:
        """The number of records that were not sent, or that the receiver rejected."""
        return self._dropped + self._sender.failed

    def close(self) -> None:
        """Send what is queued. After three seconds, requests are not tried again, and what is left is lost. A
        request that is under way ends at its timeout (OTEL_EXPORTER_OTLP_TIMEOUT, 10 s)."""
        give_up = threading.Timer(_FLUSH_SECONDS, self._sender.shutdown)
        give_up.start()
        try:
            self._provider.shutdown()
        finally:
            give_up.cancel()


class _Sender(OTLPLogExporter):
    """Counts the records that it takes from the queue and those that it cannot send."""

    def __init__(self, endpoint: str | None) -> None:
        self._session = _Session()
        super().__init__(endpoint, session=self._session)
        self.taken = self.failed = 0
        self.is_failing = False

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        self.taken += len(batch)
        result = super().export(batch)
        if result is LogRecordExportResult.SUCCESS:
            self.is_failing = False
            return result
        self.failed += len(batch)
        if not self.is_failing:
            reason = self._session.failure or "the records were not sent"
            click.echo(f"ebpfproxy: cannot export events: {reason}; they are counted as lost", err=True)
        self.is_failing = True
        return result


class _Session(requests.Session):
    """Keeps the reason why the last request failed, which the exporter only logs. "": it did not."""

    failure = ""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        target = urlsplit(request.url or "")
        place = f"{target.scheme}://{target.netloc.rpartition('@')[2]}{target.path}"  # without a password
        try:
            response = super().send(request, **options)
        except Exception as error:
            self.failure = f"{place}: {_cause(error)}"
            raise
        self.failure = "" if response.ok else f"{place}: HTTP {response.status_code} {response.reason}"
        return response


def _cause(error: BaseException) -> str:
    """The kernel's or resolver's text, which libraries wrap several times."""
    while error.__context__ is not None:
        error = error.__context__
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _is_http(url: str) -> bool:
    try:
        target = urlsplit(url)
        return target.scheme in ("http", "https") and bool(target.hostname) and target.port != 0
    except ValueError:  # the port, or a bracket
        return False


def _resource() -> Resource:
    """This node. OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME replace attributes."""
    host = os.uname().nodename
    node = {
        "service.name": "ebpfproxy",
        "service.version": __version__,
        "host.name": host,
        "k8s.node.name": host.strip().lower(),  # as kube-proxy derives it
    }
    return Resource.create(node).merge(OTELResourceDetector().detect())


def log_record(event: Event) -> LogRecord:
    """The log record of an event. Fields without a value have no attribute."""
    attributes: dict[str, str | int] = {
        **_client(event.client),
        **_place("server", event.frontend),
        **(_place("network.peer", event.endpoint) if event.endpoint else {}),
        "network.transport": event.protocol.lower(),
        "network.type": "ipv4" if family(parse_endpoint(event.frontend)[0]) is Family.IPV4 else "ipv6",
        **_service(event.service),
        "ebpfproxy.path": event.path,
    }
    if event.reason:
        attributes["error.type"] = event.reason
    if event.affinity:
        attributes["ebpfproxy.affinity"] = event.affinity
    return LogRecord(
        timestamp=round(event.time * 1e6) * 1000,
        severity_number=SeverityNumber.WARN if event.event in _FAILURES else SeverityNumber.INFO,
        body=f"{event.event} {describe(event)}",
        attributes=attributes,
        event_name=f"ebpfproxy.connection.{event.event}",
    )


def _place(prefix: str, text: str) -> dict[str, str | int]:
    address, port = parse_endpoint(text)
    return {f"{prefix}.address": format_address(address), f"{prefix}.port": port}


def _client(text: str) -> dict[str, str | int]:
    """On the socket path, the client is an address without a port, or the name of a network namespace."""
    try:
        return {"client.address": format_address(parse_address(text))}
    except ValueError:
        pass
    try:
        return _place("client", text)
    except ValueError:
        return {"ebpfproxy.client": text}


def _service(text: str) -> dict[str, str | int]:
    """A Service without a name is "?/ID" or "-". A port can have no name."""
    namespace, _, name = text.partition("/")
    name, _, port = name.partition(":")
    if not name or namespace == "?":
        return {}
    found: dict[str, str | int] = {"k8s.namespace.name": namespace, "k8s.service.name": name}
    return found | ({"ebpfproxy.service.port": port} if port else {})
