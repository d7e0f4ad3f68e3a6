"""What is not counted here, but read where it is: at each scrape, in the scraping thread.

Every reading may raise EbpfProxyError, since the kernel's state may go while it is read: a scrape then
shows all the rest.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ebpfproxy import log
from ebpfproxy.errors import EbpfProxyError
from ebpfproxy.model.counters import ServiceTraffic
from ebpfproxy.model.device import DeviceSide

SCRAPE_FAILED = "Cannot read the maps for a scrape"
"""A metric is missing in that scrape."""

_log = log.Logger(__name__)
T = TypeVar("T")

BUSIEST = 10_000
"""Services that are shown: five series each, and a scrape of 50 000 takes about a second."""


class MapUse(NamedTuple):
    """How full one BPF map is."""

    entries: int
    capacity: int


class Readings(Collector):
    """Asks at each scrape how full the maps are, how often the programs did what, and what they carried."""

    def __init__(
        self,
        maps: Callable[[], Mapping[str, MapUse]],
        events: Callable[[], Mapping[str, int]],
        traffic: Callable[[], Collection[ServiceTraffic]],
        bypassed: Callable[[], Collection[DeviceSide]],
    ) -> None:
        self._maps = maps
        self._events = events
        self._traffic = traffic
        self._bypassed = bypassed

    def collect(self) -> Iterator[Metric]:
        yield from _maps(_asked(self._maps, {}))
        yield _events(_asked(self._events, {}))
        yield from _traffic(_asked(self._traffic, ()))
        yield from _devices(_asked(self._bypassed, ()))

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the maps, which are not there yet."""
        return iter(())


def _asked(reading: Callable[[], T], nothing: T) -> T:
    try:
        return reading()
    except EbpfProxyError as error:
        _log.warning(SCRAPE_FAILED, error=error)
        return nothing


def _maps(uses: Mapping[str, MapUse]) -> Iterator[Metric]:
    entries = GaugeMetricFamily("ebpfproxy_map_entries", "Entries in a BPF map", labels=["map"])
    capacity = GaugeMetricFamily("ebpfproxy_map_capacity", "Entries that a BPF map can hold", labels=["map"])
    for name, use in uses.items():
        entries.add_metric([name], use.entries)
        capacity.add_metric([name], use.capacity)
    yield entries
    yield capacity


def _events(counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(
        "ebpfproxy_datapath_events", "What the programs in the kernel did, by why", labels=["reason"]
    )
    for reason, count in counts.items():
        family.add_metric([reason], count)
    return family


def _devices(sides: Collection[DeviceSide]) -> Iterator[Metric]:
    labels = ["device", "side"]
    position = GaugeMetricFamily(
        "ebpfproxy_device_position",
        "The place of our program at a device where it is not the first: 2 or more",
        labels=labels,
    )
    unreached = GaugeMetricFamily(
        "ebpfproxy_device_unreached", "1 where packets do not reach our program at a device", labels=labels
    )
    for each in sides:
        if each.before:
            position.add_metric([each.device, each.side], each.position)
        if each.unreached:
            unreached.add_metric([each.device, each.side], 1)
    yield from (position, unreached)
    bypassed = {(each.device, each.side) for each in sides if each.is_bypassed}
    text = "Sides of devices where packets pass without our program"
    yield GaugeMetricFamily("ebpfproxy_bypassed_device_sides", text, len(bypassed))


def _traffic(carried: Collection[ServiceTraffic]) -> Iterator[Metric]:
    """Of the busiest services: those with the most packets since they are there, so that none flickers."""
    shown: Iterable[ServiceTraffic] = carried
    if len(carried) > BUSIEST:
        shown = heapq.nlargest(BUSIEST, carried, key=lambda each: each.packets_in + each.packets_out)
    service = ["namespace", "service", "port", "protocol", "family"]
    packets = _counter("packets", "Packets that the packet path carried", [*service, "direction"])
    sizes = _counter("bytes", "Bytes of IP packets that the packet path carried", [*service, "direction"])
    flows = _counter("new_flows", "New flows of the packet path", service)
    for each in shown:
        labels = [*_split(each.service), each.protocol, each.family]
        packets.add_metric([*labels, "in"], each.packets_in)
        packets.add_metric([*labels, "out"], each.packets_out)
        sizes.add_metric([*labels, "in"], each.bytes_in)
        sizes.add_metric([*labels, "out"], each.bytes_out)
        flows.add_metric(labels, each.new_flows)
    yield from (packets, sizes, flows)
    left_out = "Services with traffic that are not shown by name, since others had more"
    yield GaugeMetricFamily("ebpfproxy_services_left_out", left_out, max(0, len(carried) - BUSIEST))


def _counter(what: str, text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(f"ebpfproxy_service_{what}", text, labels=labels)


def _split(service: str) -> tuple[str, str, str]:
    """Namespace, name and port.

    >>> _split("default/web:http"), _split("default/web")
    (('default', 'web', 'http'), ('default', 'web', ''))
    """
    namespace, _, rest = service.partition("/")
    name, _, port = rest.partition(":")
    return namespace, name, port
