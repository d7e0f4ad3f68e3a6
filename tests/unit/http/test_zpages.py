"""The pages /configz, /flagz and /statusz, through a real server."""

import json
from collections.abc import Iterator

import pytest

from ebpfproxy import __version__
from ebpfproxy.config.load import load
from ebpfproxy.http import zpages
from ebpfproxy.http.metrics import Metrics, MetricsServer
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
    loaded = load(FLAGS)
    server = MetricsServer(
        ("127.0.0.1", 0), Metrics(), lambda: "ipvs", page=lambda request: zpages.page(request, loaded)
    )
    server.start()
    assert server.port
    yield server.port
    server.stop()


def text(port: int, path: str) -> list[str]:
    answer: Answer = ask(port, path, Accept="text/plain")
    assert (answer.code, answer.headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    return answer.body.decode().splitlines()


def test_configz_has_the_names_of_kube_proxys_internal_configuration(port: int) -> None:
    answer = ask(port, "/configz")
    assert (answer.code, answer.headers["Content-Type"]) == (200, "application/json")
    config = json.loads(answer.body)["kubeproxy.config.k8s.io"]
    assert (config["Mode"], config["SyncPeriod"], config["MinSyncPeriod"]) == ("ipvs", "45s", "0s")
    assert config["NodePortAddresses"] == ["10.0.0.0/8", "fd00::/8"]
    assert config["DetectLocal"]["ClusterCIDRs"] == ["10.244.0.0/16", "fd00:10:244::/56"]
    assert config["HealthzBindAddress"] == "0.0.0.0:10256"
    linux = config["Linux"]
    assert (linux["MasqueradeAll"], linux["OOMScoreAdj"]) == (True, -999)
    assert linux["Conntrack"]["TCPEstablishedTimeout"] == "24h"


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


@pytest.mark.parametrize("path", ["/flagz", "/statusz"])
def test_another_format_than_text_is_not_acceptable(port: int, path: str) -> None:
    assert ask(port, path, Accept="application/json").code == 406
    assert ask(port, path, Accept="text/html, */*;q=0.1").code == 200


def test_another_path_is_not_found(port: int) -> None:
    assert ask(port, "/flagz/x").code == 404
