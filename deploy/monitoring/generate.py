"""The generated files of this folder: the dashboard of Grafana, and the PrometheusRule of alerts.yaml.

`make docs-generate` writes them.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_NODE = '{instance=~"$instance"}'
_WIDTH, _HEIGHT = 12, 8


def _quantile(quantile: float, histogram: str) -> str:
    return f"histogram_quantile({quantile}, sum by (le) (rate({histogram}_bucket@[5m])))"


_PANELS: list[tuple[str, str, dict[str, str]]] = [
    ("Agents by mode", "none", {"{{mode}}": "count by (mode) (ebpfproxy_info@)"}),
    ("Agents that answer", "none", {"up": 'sum(up{job=~"(.+/)?ebpfproxy", instance=~"$instance"})'}),
    (
        "Duration of syncs",
        "s",
        {
            "99 %": _quantile(0.99, "kubeproxy_sync_proxy_rules_duration_seconds"),
            "50 %": _quantile(0.5, "kubeproxy_sync_proxy_rules_duration_seconds"),
        },
    ),
    (
        "Time from a change of endpoints to the kernel",
        "s",
        {
            "99 %": _quantile(0.99, "kubeproxy_network_programming_duration_seconds"),
        },
    ),
    (
        "Services and endpoints",
        "none",
        {"services {{instance}}": "ebpfproxy_services@", "endpoints {{instance}}": "ebpfproxy_endpoints@"},
    ),
    (
        "Failed syncs and repairs",
        "none",
        {
            "failed syncs {{instance}}": "increase(ebpfproxy_sync_failures_total@[5m])",
            "repairs {{instance}}": "increase(ebpfproxy_repairs_total@[5m])",
            "rejected entries {{instance}}": "ebpfproxy_rejected_entries@",
        },
    ),
    (
        "Use of maps",
        "percentunit",
        {"{{map}} {{instance}}": "ebpfproxy_map_entries@ / ebpfproxy_map_capacity@"},
    ),
    (
        "Datapath events",
        "ops",
        {"{{reason}}": "sum by (reason) (rate(ebpfproxy_datapath_events_total@[5m]))"},
    ),
    (
        "Devices with other programs first, and bypassed",
        "none",
        {
            "position {{device}} {{instance}}": "ebpfproxy_device_position@",
            "bypassed {{instance}}": "ebpfproxy_bypassed_device_sides@",
        },
    ),
    (
        "Traffic of the packet path",
        "Bps",
        {"{{direction}}": "sum by (direction) (rate(ebpfproxy_service_bytes_total@[5m]))"},
    ),
    (
        "UDP sockets of removed endpoints",
        "none",
        {
            "stale {{instance}}": "ebpfproxy_sockets_stale@",
            "translated {{instance}}": "ebpfproxy_sockets_translated@",
            "reconnected {{instance}}": "increase(ebpfproxy_sockets_reconnected_total@[5m])",
        },
    ),
    (
        "Requests to the API server",
        "reqps",
        {"{{code}} {{method}}": "sum by (code, method) (rate(rest_client_requests_total@[5m]))"},
    ),
    (
        "Memory of agents",
        "bytes",
        {"{{instance}}": "process_resident_memory_bytes@ and on (instance) ebpfproxy_info"},
    ),
    (
        "CPU time of agents",
        "percentunit",
        {"{{instance}}": "rate(process_cpu_seconds_total@[5m]) and on (instance) ebpfproxy_info"},
    ),
]
"""Title, unit, and expressions by legend. `@` stands for the selection of nodes."""


def _panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    row, column = divmod(number, 2)
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": source,
                "expr": expression.replace("@", _NODE),
                "legendFormat": legend,
            }
            for position, (legend, expression) in enumerate(queries.items())
        ],
    }


def _dashboard() -> str:
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": "label_values(ebpfproxy_info, instance)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
        },
    ]
    board = {
        "uid": "ebpfproxy",
        "title": "ebpfproxy",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": [_panel(number, *each) for number, each in enumerate(_PANELS)],
    }
    return json.dumps(board, indent=2) + "\n"


def _rule() -> str:
    lines = (FOLDER / "alerts.yaml").read_text().splitlines()
    groups = "".join(f"  {line}\n" for line in lines if not line.startswith("#"))
    return (
        "# Generated from alerts.yaml by `make docs-generate`.\n"
        "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\n"
        "metadata:\n  name: ebpfproxy\n  namespace: kube-system\nspec:\n" + groups
    )


def files() -> dict[Path, str]:
    """The text of each generated file, by path."""
    return {FOLDER / "dashboard.json": _dashboard(), FOLDER / "prometheus-rule.yaml": _rule()}
