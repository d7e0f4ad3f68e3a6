"""New connections, errors and bytes per second, by Service and by endpoint, for `top`.

Connections and errors are counted from events, so connections that end between two samples count, too. Bytes
are those of the packet path. The programs count them by Service only with --ebpf-traffic-max.
"""

import collections
import contextlib
import time
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ebpf.inspect.counters import Readings
from ebpfproxy.backends.ebpf.inspect.events import Event, EventReader, Lost
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.model.counters import OTHER

_RENEW_SECONDS = 1.0
_ERRORS = frozenset({"rejected", "dropped", "reset"})


class ServiceRate(NamedTuple):
    """A ServicePort, per second. `bytes`: in both directions; None if the programs do not count them."""

    service: str
    connections: float
    errors: float
    bytes: float | None


class EndpointRate(NamedTuple):
    """An endpoint, per second. `errors`: resets."""

    service: str
    endpoint: str
    connections: float
    errors: float


class Sample(NamedTuple):
    """The rates since the previous sample, those with most connections first. Idle ones are left out."""

    services: list[ServiceRate]
    endpoints: list[EndpointRate]
    lost: Lost


class Rates:
    """Counts events below `root`, the bpffs root. Close with `close`.

    Raises as EventReader.
    """

    def __init__(self, root: Path, service: str = "") -> None:
        with contextlib.ExitStack() as opened:
            self._reader = EventReader(root, service)
            opened.callback(self._reader.close)
            self._readings = Readings(Pins(root).hooked_in() / "maps")
            opened.callback(self._readings.close)
            self._service = service
            self._counts: collections.Counter[tuple[str, str, bool]] = collections.Counter()
            self._bytes = self._read_bytes()
            self._lost = Lost(0, 0)
            self._began = self._renewed = time.monotonic()
            self._opened = opened.pop_all()

    def collect(self) -> None:
        """Count the events so far. Call it ten times per second or more often. Raises as `renew`."""
        if time.monotonic() - self._renewed >= _RENEW_SECONDS:
            self._reader.renew()
            self._renewed = time.monotonic()
        self._reader.read(self._count)

    def _count(self, event: Event) -> None:
        self._counts[event.service, event.endpoint, event.event in _ERRORS] += 1

    def take(self) -> Sample:
        """The rates since the previous call, or since the start."""
        self.collect()
        now, counts = time.monotonic(), self._counts
        seconds = max(now - self._began, 1e-3)
        self._began, self._counts = now, collections.Counter()
        before, self._bytes = self._bytes, self._read_bytes()
        bytes_by_service = {name: value - before.get(name, 0) for name, value in self._bytes.items()}
        lost_before, self._lost = self._lost, self._reader.lost()
        lost = Lost(*(new - old for new, old in zip(self._lost, lost_before, strict=True)))
        return Sample(_services(counts, bytes_by_service, seconds), _endpoints(counts, seconds), lost)

    def _read_bytes(self) -> dict[str, int]:
        """By Service, those with bytes that are counted separately."""
        found: collections.Counter[str] = collections.Counter()
        for each in self._readings.traffic():
            if each.service != OTHER and self._service in ("", each.service, each.service.partition(":")[0]):
                found[each.service] += each.bytes_in + each.bytes_out
        return found

    def close(self) -> None:
        self._opened.close()


def _services(
    counts: "collections.Counter[tuple[str, str, bool]]", sent: dict[str, int], seconds: float
) -> list[ServiceRate]:
    events: collections.Counter[tuple[str, bool]] = collections.Counter()
    for (service, _, is_error), count in counts.items():
        events[service, is_error] += count
    names = {service for service, _ in events} | {service for service, value in sent.items() if value}
    rows = [
        ServiceRate(
            name,
            round(events[name, False] / seconds, 1),
            round(events[name, True] / seconds, 1),
            round(max(0, sent[name]) / seconds, 1) if name in sent else None,
        )
        for name in names
    ]
    return sorted(rows, key=lambda row: (-row.connections, -row.errors, -(row.bytes or 0), row.service))


def _endpoints(counts: "collections.Counter[tuple[str, str, bool]]", seconds: float) -> list[EndpointRate]:
    names = {(service, endpoint) for service, endpoint, _ in counts if endpoint}
    rows = [
        EndpointRate(
            service,
            endpoint,
            round(counts[service, endpoint, False] / seconds, 1),
            round(counts[service, endpoint, True] / seconds, 1),
        )
        for service, endpoint in names
    ]
    return sorted(rows, key=lambda row: (-row.connections, -row.errors, row.service, row.endpoint))
