"""The metrics that are read from the kernel at each scrape, in the thread of the scrape.

A function that reads may raise EbpfProxyError, since kernel objects may be removed meanwhile. The scrape then
lacks only the metrics of that function.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ebpfproxy import log
from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import (
    IptablesCounts,
    LocalhostCounts,
    NftablesCounts,
    PacketCounts,
    Report,
    ServiceTraffic,
    SyncCounts,
    TableUse,
)
from ebpfproxy.model.device import DeviceSide

SCRAPE_FAILED = "Cannot read the maps for a scrape"
"""That scrape lacks some metrics; `error` names the cause."""

_log = log.Logger(__name__)
T = TypeVar("T")


class Readings(Collector):
    """The collector of map sizes, datapath events, traffic by Service, bypassed devices and syncs."""

    def __init__(self, report: Callable[[], Report], bypassed: Callable[[], Collection[DeviceSide]]) -> None:
        self._report = report
        self._bypassed = bypassed

    def collect(self) -> Iterator[Metric]:
        report = _read(self._report, Report())
        yield from _maps(report.usage)
        yield _events(report.events)
        yield from _traffic(report.traffic)
        yield from _devices(_read(self._bypassed, ()))
        yield from _syncs(report.syncs)

    def describe(self) -> Iterator[Metric]:
        """Return nothing. The registry calls this before the maps exist."""
        return iter(())


def _read(function: Callable[[], T], default: T) -> T:
    try:
        return function()
    except EbpfProxyError as error:
        _log.warning(SCRAPE_FAILED, error=error)
        return default


def _maps(uses: Mapping[str, TableUse]) -> Iterator[Metric]:
    entries = GaugeMetricFamily("ebpfproxy_map_entries", "Entries in a BPF map", labels=["map"])
    capacity = GaugeMetricFamily("ebpfproxy_map_capacity", "Entries that a BPF map can hold", labels=["map"])
    for name, use in uses.items():
        entries.add_metric([name], use.entries)
        capacity.add_metric([name], use.capacity)
    yield entries
    yield capacity


def _events(counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(
        "ebpfproxy_datapath_events", "Events in the BPF programs, by reason", labels=["reason"]
    )
    for reason, count in counts.items():
        family.add_metric([reason], count)
    return family


def _devices(sides: Collection[DeviceSide]) -> Iterator[Metric]:
    labels = ["device", "side"]
    position = GaugeMetricFamily(
        "ebpfproxy_device_position",
        "Position of ebpfproxy's program at a device where it is not the first: 2 or more",
        labels=labels,
    )
    unreached = GaugeMetricFamily(
        "ebpfproxy_device_unreached",
        "1 if packets do not reach ebpfproxy's program at a device",
        labels=labels,
    )
    for each in sides:
        if each.before:
            position.add_metric([each.device, each.side], each.position)
        if each.unreached:
            unreached.add_metric([each.device, each.side], 1)
    yield from (position, unreached)
    bypassed = {(each.device, each.side) for each in sides if each.is_bypassed}
    text = "Sides of devices where packets bypass ebpfproxy's program"
    yield GaugeMetricFamily("ebpfproxy_bypassed_device_sides", text, len(bypassed))


def _traffic(traffic: Collection[ServiceTraffic]) -> Iterator[Metric]:
    """Yield the traffic by Service. --ebpf-traffic-max limits the number of series: five for each Service,
    and five for the sum of all others, which has the label service="other" and an empty namespace.
    """
    service = ["namespace", "service", "port", "protocol", "family"]
    packets = _counter("packets", "Packets of the packet path", [*service, "direction"])
    sizes = _counter("bytes", "Bytes of IP packets of the packet path", [*service, "direction"])
    flows = _counter("new_flows", "New flows of the packet path", service)
    for each in traffic:
        labels = [*_split(each.service), each.protocol, each.family]
        packets.add_metric([*labels, "in"], each.packets_in)
        packets.add_metric([*labels, "out"], each.packets_out)
        sizes.add_metric([*labels, "in"], each.bytes_in)
        sizes.add_metric([*labels, "out"], each.bytes_out)
        flows.add_metric(labels, each.new_flows)
    yield from (packets, sizes, flows)


def _syncs(counts: Collection[SyncCounts]) -> Iterator[Metric]:
    """Yield kube-proxy's metrics of the current mode. As in kube-proxy, other modes do not have them."""
    iptables = [each for each in counts if isinstance(each, IptablesCounts)]
    nftables = [each for each in counts if isinstance(each, NftablesCounts)]
    yield from _failures(
        "iptables_restore_failures",
        "Cumulative proxy iptables restore failures",
        {each.family: each.restore_failures for each in iptables},
    )
    yield from _failures(
        "iptables_partial_restore_failures",
        "Cumulative proxy iptables partial restore failures",
        {each.family: each.partial_failures for each in iptables if each.partial_failures is not None},
    )
    yield from _rules(
        "iptables_total",
        "Total number of iptables rules owned by kube-proxy",
        {each.family: each.rules for each in iptables},
    )
    yield from _rules(
        "iptables_last",
        "Number of iptables rules written by kube-proxy in last sync",
        {each.family: each.rules_last for each in iptables},
    )
    yield from _failures(
        "nftables_sync_failures",
        "Cumulative proxy nftables sync failures",
        {each.family: each.sync_failures for each in nftables},
    )
    yield from _failures(
        "nftables_cleanup_failures",
        "Cumulative proxy nftables cleanup failures",
        {each.family: each.cleanup_failures for each in nftables},
    )
    yield from _localhost([each for each in counts if isinstance(each, LocalhostCounts)])
    for each in counts:
        if isinstance(each, PacketCounts):
            yield from _packets(each)


def _localhost(counts: Collection[LocalhostCounts]) -> Iterator[Metric]:
    """Yield kube-proxy's metrics of NodePorts on loopback (KEP-6032); nothing without such NodePorts."""
    prefix = "kubeproxy_nftables_localhost_nodeport"
    listeners = GaugeMetricFamily(
        f"{prefix}_listeners",
        "Number of NodePorts that a relay serves on loopback",
        labels=["ip_family"],
    )
    failures = CounterMetricFamily(
        f"{prefix}_listener_creation_failures",
        "Failed attempts to listen for a NodePort on loopback",
        labels=["ip_family"],
    )
    packets = CounterMetricFamily(
        f"{prefix}_rejected_packets",
        "Packets to NodePorts on loopback that were rejected, because only TCP is served there",
        labels=["ip_family", "protocol"],
    )
    for each in counts:
        family = each.family.value
        listeners.add_metric([family], each.listeners)
        failures.add_metric([family], each.listener_failures)
        for protocol, count in each.rejected_packets.items():
            packets.add_metric([family, protocol.name], count)
    if counts:
        yield from (listeners, failures, packets)


def _packets(counts: PacketCounts) -> Iterator[Metric]:
    for name, text, count in (
        (
            "ct_state_invalid_dropped_packets",
            "packets dropped by iptables to work around conntrack problems",
            counts.invalid_dropped,
        ),
        (
            "localhost_nodeports_accepted_packets",
            "Number of packets accepted on nodeports of loopback interface",
            counts.localhost_node_ports,
        ),
    ):
        if count is not None:
            yield CounterMetricFamily(f"kubeproxy_iptables_{name}", text, count)


def _failures(name: str, text: str, counts: Mapping[Family, int]) -> Iterator[Metric]:
    metric = CounterMetricFamily(f"kubeproxy_sync_proxy_rules_{name}", text, labels=["ip_family"])
    for family, count in counts.items():
        metric.add_metric([family.value], count)
    if counts:
        yield metric


def _rules(name: str, text: str, counts: Mapping[Family, Mapping[str, int]]) -> Iterator[Metric]:
    metric = GaugeMetricFamily(f"kubeproxy_sync_proxy_rules_{name}", text, labels=["table", "ip_family"])
    for family, by_table in counts.items():
        for table, count in by_table.items():
            metric.add_metric([table, family.value], count)
    if metric.samples:
        yield metric


def _counter(name: str, text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(f"ebpfproxy_service_{name}", text, labels=labels)


def _split(service: str) -> tuple[str, str, str]:
    """Split into namespace, name and port.

    >>> _split("default/web:http"), _split("default/web"), _split("other")
    (('default', 'web', 'http'), ('default', 'web', ''), ('', 'other', ''))
    """
    namespace, _, rest = service.rpartition("/")
    name, _, port = rest.partition(":")
    return namespace, name, port
