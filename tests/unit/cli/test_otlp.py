"""Events as log records, and their way to an OTLP receiver."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy import __version__, cli
from ebpfproxy.backends.ebpf.inspect.events import Event, Lost
from ebpfproxy.errors import ConfigError
from tests.support.missing import optional_module
from tests.support.otlp_receiver import Receiver, receiving

otlp = optional_module("ebpfproxy.cli.otlp", "opentelemetry-exporter-otlp-proto-http")

NEW = Event(
    *(
        1_700_000_000.123456,
        "new",
        "default/web:http",
        "TCP",
        "packet",
        "192.0.2.7:40112",
        "192.0.2.10:30080",
    ),
    *("10.244.1.3:8080", "", "set"),
)
REJECTED = Event(
    *(1_700_000_000.5, "rejected", "prod/dns:dns", "UDP", "socket", "fd00::7", "[fd00:10::a]:53", ""),
    *("no-endpoints", ""),
)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened


@pytest.fixture
def unreachable() -> Iterator[str]:
    """The URL of a port at which nothing listens: the socket is bound only."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def export(url: str, *events: Event) -> Any:
    exporter = otlp.EventExporter(url)
    for event in events:
        exporter.event(event)
    exporter.close()
    return exporter


def test_an_event_has_the_attributes_of_the_semantic_conventions() -> None:
    assert dict(otlp.log_record(NEW).attributes) == {
        "client.address": "192.0.2.7",
        "client.port": 40112,
        "server.address": "192.0.2.10",
        "server.port": 30080,
        "network.peer.address": "10.244.1.3",
        "network.peer.port": 8080,
        "network.transport": "tcp",
        "network.type": "ipv4",
        "k8s.namespace.name": "default",
        "k8s.service.name": "web",
        "ebpfproxy.service.port": "http",
        "ebpfproxy.path": "packet",
        "ebpfproxy.affinity": "set",
    }


def test_an_event_without_endpoint_has_a_reason_and_no_peer() -> None:
    assert dict(otlp.log_record(REJECTED).attributes) == {
        "client.address": "fd00::7",
        "server.address": "fd00:10::a",
        "server.port": 53,
        "network.transport": "udp",
        "network.type": "ipv6",
        "k8s.namespace.name": "prod",
        "k8s.service.name": "dns",
        "ebpfproxy.service.port": "dns",
        "ebpfproxy.path": "socket",
        "error.type": "no-endpoints",
    }


@pytest.mark.parametrize("client", ["node", "netns 4026532281"])
def test_a_client_without_an_address_is_named(client: str) -> None:
    attributes = dict(otlp.log_record(REJECTED._replace(client=client)).attributes)
    assert attributes["ebpfproxy.client"] == client
    assert not [name for name in attributes if name.startswith("client.")]


@pytest.mark.parametrize(
    ("service", "named"),
    [
        ("default/web", {"k8s.namespace.name": "default", "k8s.service.name": "web"}),
        ("-", {}),
        ("?/77", {}),
    ],
)
def test_a_service_without_port_name_or_name(service: str, named: dict[str, str]) -> None:
    attributes = dict(otlp.log_record(REJECTED._replace(service=service)).attributes)
    assert {
        k: v for k, v in attributes.items() if k.startswith("k8s.") or k == "ebpfproxy.service.port"
    } == named


@pytest.mark.parametrize(
    ("kind", "severity"),
    [("new", "INFO"), ("reconnected", "INFO"), ("rejected", "WARN"), ("dropped", "WARN"), ("reset", "WARN")],
)
def test_failures_are_warnings(kind: str, severity: str) -> None:
    record = otlp.log_record(NEW._replace(event=kind))
    assert (record.event_name, record.severity_number.name) == (f"ebpfproxy.connection.{kind}", severity)


def test_the_documentation_has_all_attributes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "diagnose.md").read_text()
    records = [otlp.log_record(each) for each in (NEW, REJECTED, REJECTED._replace(client="node"))]
    for name in {name for record in records for name in record.attributes}:
        assert f"`{name}`" in page


def test_the_receiver_gets_records_with_time_and_resource(receiver: Receiver) -> None:
    exporter = export(f"{receiver.url}/", NEW, REJECTED)
    assert exporter.lost == 0
    assert receiver.paths == ["/v1/logs"]
    new, rejected = receiver.records
    assert new.attributes == dict(otlp.log_record(NEW).attributes)
    assert (new.event_name, new.severity) == ("ebpfproxy.connection.new", "INFO")
    assert new.time == pytest.approx(NEW.time, abs=1e-6)
    assert new.scope == "ebpfproxy.monitor"
    wanted = {"service.name": "ebpfproxy", "service.version": __version__, "host.name": os.uname().nodename}
    assert wanted.items() <= new.resource.items()
    assert new.resource["k8s.node.name"] == os.uname().nodename.lower()
    assert rejected.body == "rejected prod/dns:dns UDP fd00::7 -> [fd00:10::a]:53 no-endpoints"


def test_variables_of_the_environment_have_an_effect(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.node.name=worker-1,k8s.cluster.name=prod")
    export("", NEW)
    assert (receiver.paths, receiver.headers[0]["x-token"]) == (["/v1/logs"], "secret")
    resource = receiver.records[0].resource
    assert (resource["k8s.node.name"], resource["k8s.cluster.name"]) == ("worker-1", "prod")


def test_an_unreachable_receiver_costs_events_and_prints_one_line(
    unreachable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    exporter = otlp.EventExporter(unreachable.replace("//", "//user:secret@"))
    exporter.event(NEW)
    wait(lambda: exporter.lost == 1)
    exporter.event(NEW)
    exporter.close()
    assert exporter.lost == 2
    assert capsys.readouterr().err == (
        f"ebpfproxy: cannot export events: {unreachable}/v1/logs: Connection refused; "
        "they are counted as lost\n"
    )


@pytest.mark.timeout(25)
def test_close_ends_the_attempts_to_reach_a_receiver(
    unreachable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library waits half a minute for its thread, which tries a batch again until its timeout."""
    monkeypatch.setattr(otlp, "_FLUSH_SECONDS", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    assert export(unreachable, NEW).lost == 1


def test_a_receiver_that_works_again_gets_events(
    receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.status = 400
    exporter = otlp.EventExporter(receiver.url)
    exporter.event(NEW)
    wait(lambda: exporter.lost == 1)
    receiver.status = 200
    exporter.event(REJECTED)
    exporter.close()
    assert [each.event_name for each in receiver.records] == ["ebpfproxy.connection.rejected"]
    assert exporter.lost == 1
    assert f"{receiver.url}/v1/logs: HTTP 400 Bad Request;" in capsys.readouterr().err


def test_events_over_the_queue_are_counted(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_QUEUE", 600)
    exporter = otlp.EventExporter(receiver.url)
    monkeypatch.setattr(exporter._logger, "emit", lambda _record: None)  # nothing leaves the queue
    for _ in range(700):
        exporter.event(NEW)
    assert exporter.lost == 100
    exporter.close()


def test_lost_events_are_a_record(receiver: Receiver) -> None:
    exporter = otlp.EventExporter(receiver.url)
    exporter.missed(Lost(rate=3, buffer=0))
    exporter.close()
    (record,) = receiver.named("ebpfproxy.events.lost")
    assert record.attributes == {"ebpfproxy.lost.rate": 3, "ebpfproxy.lost.buffer": 0}
    assert record.severity == "WARN"


@pytest.mark.parametrize(
    "url", ["localhost:4318", "ftp://host", "http://[::1", "http://host:port", "http://"]
)
def test_an_invalid_url_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL of http or https"):
        otlp.EventExporter(url)


def test_an_invalid_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BLRP_MAX_EXPORT_BATCH_SIZE", "100000")
    with pytest.raises(ConfigError, match="max_export_batch_size"):
        otlp.EventExporter("http://localhost:4318")


def test_without_the_package_the_command_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "ebpfproxy.cli.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk._logs", None)
    assert cli.main(["monitor", f"--bpffs-root={tmp_path}", "--otlp"]) == 2
    assert capsys.readouterr().err == (
        "ebpfproxy: --otlp needs the Python package opentelemetry-exporter-otlp-proto-http\n"
        "  hint: pip install 'ebpfproxy[otlp]'\n"
    )


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
