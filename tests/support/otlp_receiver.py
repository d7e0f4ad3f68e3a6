"""A receiver of OTLP over HTTP for log records."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.support.missing import skip_or_fail


class Received(NamedTuple):
    """A log record. `resource` and `attributes` have the values of AnyValue by name. `severity`: "INFO"."""

    resource: dict[str, Any]
    scope: str
    event_name: str
    severity: str
    body: str
    time: float
    attributes: dict[str, Any]


class Receiver:
    """`records` in the order of arrival, and the headers and paths of requests. `status`: that of replies."""

    def __init__(self) -> None:
        self.records: list[Received] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.status = 200
        self.url = ""

    def named(self, event_name: str) -> list[Received]:
        return [each for each in self.records if each.event_name == event_name]


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver at a free port of 127.0.0.1. Skips the test if the package is missing."""
    try:
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    except ImportError:
        skip_or_fail("no Python package opentelemetry-exporter-otlp-proto-http: make setup")
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            receiver.paths.append(self.path)
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            if receiver.status == 200:
                receiver.records += _records(ExportLogsServiceRequest.FromString(content))
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def _records(request: Any) -> Iterator[Received]:
    for resource in request.resource_logs:
        for scope in resource.scope_logs:
            for record in scope.log_records:
                yield Received(
                    _values(resource.resource.attributes),
                    scope.scope.name,
                    record.event_name,
                    type(record)
                    .DESCRIPTOR.fields_by_name["severity_number"]
                    .enum_type.values_by_number[record.severity_number]
                    .name.removeprefix("SEVERITY_NUMBER_"),
                    record.body.string_value,
                    record.time_unix_nano / 1e9,
                    _values(record.attributes),
                )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
