"""The table of all metrics, from the collectors that the agent registers: `make docs-generate`."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from prometheus_client import Metric

from ebpfproxy.http.metrics import Metrics
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.model.counters import (
    IptablesCounts,
    LocalhostCounts,
    NftablesCounts,
    PacketCounts,
    Report,
    ServiceTraffic,
    TableUse,
)
from ebpfproxy.model.device import DeviceSide

_HEADER = "| metric | type | labels | mode | meaning |\n|---|---|---|---|---|\n"
_ALL = "all"
_MODES = {
    "ebpfproxy_map_": "ebpf",
    "ebpfproxy_datapath_": "ebpf",
    "ebpfproxy_device_": "ebpf",
    "ebpfproxy_bypassed_": "ebpf",
    "ebpfproxy_service_": "ebpf",
    "ebpfproxy_sockets_reconnected": "ebpf",
    "ebpfproxy_sockets_stale": "ebpf",
    "ebpfproxy_sockets_translated": "ebpf",
    "kubeproxy_iptables_": "iptables",
    "kubeproxy_nftables_": "nftables",
    "kubeproxy_conntrack_reconciler_": "nftables, iptables, ipvs",
    "kubeproxy_sync_proxy_rules_iptables_restore_failures": "iptables, ipvs",
    "kubeproxy_sync_proxy_rules_iptables_": "iptables",
    "kubeproxy_sync_proxy_rules_nftables_": "nftables",
}
"""Modes by prefix of the name. The first prefix that matches applies."""


class Row(NamedTuple):
    """A metric. `name` is that of its series, without the suffixes of a histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def mode(self) -> str:
        return next((mode for prefix, mode in _MODES.items() if self.name.startswith(prefix)), _ALL)


def rows() -> list[Row]:
    """All metrics, sorted by name. Those that are read at a scrape are read from example values."""
    metrics = Metrics(
        lambda: Report(
            {"services": TableUse(1, 2)},
            {"connect": 1},
            (ServiceTraffic("default/web", "TCP", "IPv4", 1, 1, 1, 1, 1),),
            (
                IptablesCounts(Family.IPV4, rules={"nat": 1}, rules_last={"nat": 1}),
                NftablesCounts(Family.IPV4),
                LocalhostCounts(Family.IPV4, 1, 0, {Protocol.UDP: 0}),
                PacketCounts(0, 0),
            ),
        ),
        lambda: (DeviceSide("eth0", "ingress", ("other",), unreached=True),),
    )
    labels = dict(_declared_labels(metrics))
    found = [_row(each, labels.get(each.name)) for each in metrics.registry.collect()]
    return sorted(found)


def _declared_labels(metrics: Metrics) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The labels of the metrics that are declared at the start, by name. They may have no series yet."""
    collectors: Any = metrics.registry._collector_to_names  # the library has no public way
    for each in collectors:
        if hasattr(each, "_labelnames"):
            yield each._name, tuple(each._labelnames)


def _row(metric: Metric, labels: tuple[str, ...] | None) -> Row:
    if labels is None:
        labels = tuple(sorted({name for sample in metric.samples for name in sample.labels}))
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return Row(name, metric.type, labels, metric.documentation)


def table() -> str:
    """The generated part of docs/metrics.md."""
    return _HEADER + "".join(
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{each}`' for each in row.labels)} | {row.mode} "
        f"| {row.help} |\n"
        for row in rows()
    )
