"""Alerts and dashboard: valid, about metrics that exist, and with a runbook for each alert."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support import chart, metric_names, monitoring_schemas, prometheus
from tests.support.kustomize import DEPLOY, REPOSITORY

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


def operator_objects() -> list[dict[str, Any]]:
    """Those of kustomize, and those of the chart."""
    files = [DEPLOY / "monitoring" / name for name in ("pod-monitor.yaml", "prometheus-rule.yaml")]
    rendered = chart.render(chart.example(DEPLOY / "helm/examples/monitoring.yaml"))
    found = [each for each in rendered if each["apiVersion"] == "monitoring.coreos.com/v1"]
    return [*(yaml.safe_load(file.read_text()) for file in files), *found]


def test_the_objects_of_the_prometheus_operator_are_valid() -> None:
    found = operator_objects()
    assert sorted(each["kind"] for each in found) == ["PodMonitor"] * 2 + ["PrometheusRule"] * 2
    for each in found:
        monitoring_schemas.validate(each)


def test_pod_monitors_drop_the_version_of_kube_proxy() -> None:
    """The alert KubeVersionMismatch of kubernetes-mixin compares it with the versions of the cluster."""
    dropped = {"sourceLabels": ["__name__"], "regex": "kubernetes_build_info", "action": "drop"}
    for each in operator_objects():
        if each["kind"] == "PodMonitor":
            assert each["spec"]["podMetricsEndpoints"][0]["metricRelabelings"] == [dropped]


@pytest.mark.parametrize(
    ("kind", "where", "value"),
    [
        ("PodMonitor", ("spec", "selector"), None),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "interval"), "30 s"),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "port"), 10249),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "relabelings", 0, "sourceLabels"), ["a-b"]),
        ("PodMonitor", ("spec", "podMetricEndpoints"), []),
        ("PrometheusRule", ("apiVersion",), "monitoring.coreos.com/v1alpha1"),
        ("PrometheusRule", ("spec", "groups", 0, "name"), ""),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "for"), "2 minutes"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "labels"), {"severity": 1}),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "expression"), "up"),
    ],
)
def test_the_schemas_find_mistakes(kind: str, where: tuple[str | int, ...], value: object) -> None:
    entry = copy.deepcopy(next(each for each in operator_objects() if each["kind"] == kind))
    *path, last = where
    place: Any = entry
    for step in path:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        monitoring_schemas.validate(entry)
