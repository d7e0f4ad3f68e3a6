"""Debian's Prometheus: its checks, and a server in a network namespace that fires the project's alerts."""

import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ebpfproxy.lab import Netns
from tests.support import extracted
from tests.support.kustomize import DEPLOY

ALERTS = DEPLOY / "monitoring/alerts.yaml"
DASHBOARD = DEPLOY / "monitoring/dashboard.json"

_PORT = 9090
_RANGE = re.compile(r"\[\d+m\]")
_OFFSET = re.compile(r"offset \d+m")


def rules() -> list[dict[str, Any]]:
    """The rules of alerts.yaml."""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def promtool(*arguments: str | Path, folder: Path | None = None) -> str:
    """The output of promtool. Raises AssertionError if it fails."""
    command = [extracted.path("/usr/bin/promtool"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shortened(folder: Path) -> Path:
    """alerts.yaml with times of some seconds, so that a fault fires an alert at once."""
    text = _OFFSET.sub("offset 10s", _RANGE.sub("[10s]", ALERTS.read_text()))
    text = text.replace("timestamp_seconds > 30)", "timestamp_seconds > 2)")
    path = folder / "alerts.yaml"
    path.write_text(re.sub(r"for: \S+", "for: 1s", text))
    return path


@contextlib.contextmanager
def server(node: Netns, folder: Path, target: str = "127.0.0.1:10249") -> Iterator["Server"]:
    """Within the block, a server in the namespace scrapes and evaluates the shortened alerts every second."""
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(shortened(folder))],
        "scrape_configs": [{"job_name": "ebpfproxy", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = node.popen(
            [
                str(extracted.path("/usr/bin/prometheus")),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{_PORT}",
                "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
        )
    try:
        yield Server(node)
    finally:
        process.kill()
        process.wait()


class Server:
    """A running server."""

    def __init__(self, node: Netns) -> None:
        self._node = node

    def firing(self) -> set[str]:
        """The names of the alerts that fire; empty while the server starts."""
        try:
            body = self._node.call(self._alerts)
        except OSError:
            return set()
        alerts = json.loads(body)["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def value(self, expression: str) -> float | None:
        """The value of the first series of an expression, None if there is none."""
        try:
            body = self._node.call(lambda: self._query(expression))
        except OSError:
            return None
        found = json.loads(body)["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    @staticmethod
    def _alerts() -> str:
        return _get("/api/v1/alerts")

    @staticmethod
    def _query(expression: str) -> str:
        return _get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")


def _get(path: str) -> str:
    try:
        body: bytes = urllib.request.urlopen(f"http://127.0.0.1:{_PORT}{path}", timeout=10).read()
    except urllib.error.HTTPError as error:  # 503 while it starts; from 3.13 on it cannot be pickled
        raise ConnectionError(str(error)) from None
    return body.decode()
