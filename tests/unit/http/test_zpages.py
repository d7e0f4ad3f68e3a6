"""The pages /configz, /flagz and /statusz, through a real server."""

import dataclasses
import http.client
import json
import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy import __version__
from ebpfproxy.config.load import load
from ebpfproxy.diagnose.bundle.node import FIELDS
from ebpfproxy.diagnose.bundle.redact import redact_json
from ebpfproxy.http import zpages
from ebpfproxy.http.metrics import Metrics, MetricsServer
from ebpfproxy.http.server import plain
from tests.unit.http.http_client import Answer, ask

FLAGS = {
    "proxy_mode": "ipvs",
    "nodeport_addresses": ("10.0.0.0/8,fd00::/8",),
    "cluster_cidr": "10.244.0.0/16,fd00:10:244::/56",
    "sync_period": "45s",
    "masquerade_all": "true",
}


@pytest.fixture
def port() -> Iterator[int]:
    yield from serve(FLAGS)


@pytest.fixture
def profiled_port() -> Iterator[int]:
    yield from serve(FLAGS | {"profiling": "true"})


def serve(flags: Mapping[str, Any]) -> Iterator[int]:
    loaded = load(flags)
    server = MetricsServer(
        ("127.0.0.1", 0),
        Metrics(),
        lambda: "ipvs",
        page=lambda request: zpages.page(request, loaded),
        ready=lambda request: plain(200, "ok"),
    )
    server.start()
    assert server.port
    yield server.port
    server.stop()


def text(port: int, path: str) -> list[str]:
    answer: Answer = ask(port, path, Accept="text/plain")
    assert (answer.code, answer.headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    return answer.body.decode().splitlines()


def test_configz_is_a_configuration_file_that_the_agent_reads_again(port: int, tmp_path: Path) -> None:
    answer = ask(port, "/configz")
    assert (answer.code, answer.headers["Content-Type"]) == (200, "application/json")
    assert json.loads(redact_json(answer.body.decode(), FIELDS)) == json.loads(answer.body)
    config = json.loads(answer.body)["kubeproxy.config.k8s.io"]
    assert config["apiVersion"] == "kubeproxy.config.k8s.io/v1alpha1"
    assert config["kind"] == "KubeProxyConfiguration"
    assert (config["mode"], config["iptables"]["syncPeriod"], config["oomScoreAdj"]) == ("ipvs", "45s", -999)
    assert config["nodePortAddresses"] == ["10.0.0.0/8", "fd00::/8"]
    assert config["clusterCIDR"] == "10.244.0.0/16,fd00:10:244::/56"
    assert config["healthzBindAddress"] == "0.0.0.0:10256"
    assert config["conntrack"]["tcpEstablishedTimeout"] == "24h"
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    again = load({"config": str(file)})
    assert again.remarks == ()
    assert dataclasses.replace(again.config, config=None) == dataclasses.replace(
        load(FLAGS).config, healthz_bind_address="0.0.0.0:10256", metrics_bind_address="127.0.0.1:10249"
    )


def test_flagz_has_a_line_for_each_flag(port: int) -> None:
    lines = text(port, "/flagz")
    assert lines[1] == "ebpfproxy flags"
    assert {"proxy-mode=ipvs", "sync-period=45s", "config=", "v=0"} <= set(lines)
    flags = [line.partition("=")[0] for line in lines if "=" in line]
    assert flags == sorted(flags)


def test_statusz_has_the_version_and_the_time_since_the_start(port: int) -> None:
    lines = text(port, "/statusz")
    assert lines[1] == "ebpfproxy statusz"
    values = dict(line.split(": ", 1) for line in lines[3:] if ": " in line)
    assert values["Binary version"] == __version__
    assert values["Up"].startswith("0 hr ")


OBJECT = "application/json;g=config.k8s.io;v={};as={}"


@pytest.mark.parametrize("version", ["v1beta1", "v1alpha1"])
def test_flagz_and_statusz_are_objects_if_the_client_accepts_them(port: int, version: str) -> None:
    """KEP-4827 and KEP-4828."""

    def fields(path: str, kind: str) -> Any:
        answer = ask(port, path, Accept=f"application/yaml;as={kind}, {OBJECT.format(version, kind)}, */*")
        assert (answer.code, answer.headers["Content-Type"]) == (200, "application/json")
        body = json.loads(answer.body)
        assert (body.pop("kind"), body.pop("apiVersion")) == (kind, f"config.k8s.io/{version}")
        assert body.pop("metadata") == {"name": "ebpfproxy"}
        return body

    assert fields("/flagz", "Flagz")["flags"].items() >= {"proxy-mode": "ipvs", "v": "0"}.items()
    status = fields("/statusz", "Statusz")
    started = datetime.strptime(status["startTime"], "%Y-%m-%dT%H:%M:%S%z")
    assert 0 <= (datetime.now(UTC) - started).total_seconds() - status["uptimeSeconds"] < 2
    assert status["binaryVersion"] == __version__
    for path in status["paths"]:
        assert ask(port, path).code != 404


@pytest.mark.parametrize(("path", "kind"), [("/flagz", "Flagz"), ("/statusz", "Statusz")])
@pytest.mark.parametrize(
    ("accept", "code"),
    [
        ("application/json", 406),
        ("application/json;g=config.k8s.io;v=v1beta1", 406),
        ("application/json;g=config.k8s.io;v=v2;as={}", 406),
        ("application/xml", 406),
        ("application/json;g=config.k8s.io;v=v2;as={}, */*", 200),
        ("text/html, */*;q=0.1", 200),
        ("", 200),
    ],
)
def test_other_formats_than_text_and_the_object_are_not_acceptable(
    port: int, path: str, kind: str, accept: str, code: int
) -> None:
    answer = ask(port, path, Accept=accept.format(kind))
    assert answer.code == code
    assert answer.headers["Content-Type"].startswith("text/plain")


@pytest.fixture
def agents_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("ebpfproxy")
    level = logger.level
    yield logger
    logger.setLevel(level)


def put(port: int, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("PUT", "/debug/flags/v", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_put_of_debug_flags_v_sets_the_log_level(profiled_port: int, agents_logger: logging.Logger) -> None:
    assert put(profiled_port, b"4") == (200, b"the log level is 4\n")
    assert agents_logger.level == logging.DEBUG
    for body in (b"", b"high", b"-1", b"\xff", b"4" * 64, b"4" * 65, b"4" * 1000):
        code, text = put(profiled_port, body)
        assert (code, text[:25]) == (400, b"cannot set the log level:")
    assert ask(profiled_port, "/debug/flags/v").code == 406
    assert agents_logger.level == logging.DEBUG
    assert put(profiled_port, b"0")[0] == 200
    assert agents_logger.level == logging.INFO


def test_debug_flags_v_exists_only_with_profiling(port: int, agents_logger: logging.Logger) -> None:
    level = agents_logger.level
    assert put(port, b"4")[0] == 404
    assert agents_logger.level == level
