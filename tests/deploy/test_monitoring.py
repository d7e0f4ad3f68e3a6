"""Alerts and dashboard: valid, about metrics that exist, and with a runbook for each alert."""

import json
import re
import shutil
from pathlib import Path

import yaml

from tests.support import metric_names, prometheus
from tests.support.kustomize import REPOSITORY

_METRIC = re.compile(r"\b(?:ebpfproxy|kubeproxy|rest_client|process)_[a-z0-9_]+")


def test_the_alerts_are_valid() -> None:
    prometheus.promtool("check", "rules", prometheus.ALERTS)


def test_each_alert_fires_for_its_fault_only(tmp_path: Path) -> None:
    shutil.copy(prometheus.ALERTS, tmp_path)
    test = Path(__file__).with_name("alerts_test.yaml")
    expected = yaml.safe_load(test.read_text())["tests"][0]["promql_expr_test"][0]["exp_samples"]
    named = {re.findall(r'alertname="(\w+)"', each["labels"])[0] for each in expected}
    assert named == {rule["alert"] for rule in prometheus.rules()}
    shutil.copy(test, tmp_path)
    prometheus.promtool("test", "rules", test.name, folder=tmp_path)


def test_alerts_are_about_metrics_that_exist() -> None:
    known = metric_names.all_names()
    for rule in prometheus.rules():
        used = set(_METRIC.findall(rule["expr"]))
        assert used <= known, rule["alert"]
        assert used or "up{" in rule["expr"]


def test_each_alert_has_a_severity_a_summary_and_a_runbook() -> None:
    page = REPOSITORY / "docs/troubleshooting.md"
    headings = re.findall(r"^### (\w+)$", page.read_text(), re.MULTILINE)
    for rule in prometheus.rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        anchor = f"docs/troubleshooting.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == anchor
        assert rule["alert"] in headings


def test_the_dashboard_shows_metrics_that_exist_with_valid_expressions(tmp_path: Path) -> None:
    board = json.loads(prometheus.DASHBOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    known = metric_names.all_names()
    for expression in expressions:
        used = set(_METRIC.findall(expression))
        assert used <= known, expression
        assert "$instance" in expression
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$instance", ".*")}
        for number, expression in enumerate(expressions)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    prometheus.promtool("check", "rules", path)


def test_the_panels_do_not_overlap() -> None:
    board = json.loads(prometheus.DASHBOARD.read_text())
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (place["x"] + column, place["y"] + row)
        for place in places
        for column in range(place["w"])
        for row in range(place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert len({panel["title"] for panel in board["panels"]}) == len(places)
