"""Counters of the programs: events by their reason, and the packet path's traffic by service.

All values are per CPU in the kernel, and only grow while a map exists. Those of a service start at zero when
its id is assigned. Services whose id is above --ebpf-traffic-max are counted together.
"""

import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.errors import NotFound
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import protocol_name
from ebpfproxy.model.counters import OTHER, ServiceTraffic

_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_WORDS = abi.TRAFFIC.size // _U64.size


class ServiceName(NamedTuple):
    """An entry of `service_names`: "namespace/name:port", IPPROTO_*, and 4 or 6."""

    text: str
    protocol: int
    family: int


_OTHER = ServiceName(OTHER, 0, 0)


def service_names(names: Map) -> dict[int, ServiceName]:
    """By service id."""
    return {_U32.unpack(key)[0]: service_name(value) for key, value in names.items()}


def service_name(value: bytes) -> ServiceName:
    """Invalid text, which another program may have written, is decoded with replacements."""
    text, protocol, family = abi.SERVICE_NAME.unpack(value)
    return ServiceName(text.partition(b"\0")[0].decode(errors="replace"), protocol, family)


def events(counters: Map) -> dict[str, tuple[int, ...]]:
    """The value of each CPU, by counter name, in the order of abi.h's enum counter."""
    found = {_U32.unpack(key)[0]: value for key, value in counters.items()}
    return {
        name: tuple(row[0] for row in _U64.iter_unpack(found[number]))
        for number, name in abi.COUNTERS.items()
        if number in found
    }


def traffic(of: Map, names: dict[int, ServiceName]) -> Iterator[ServiceTraffic]:
    """The traffic of those services in `names` that have had any, and the sum OTHER of those without an
    entry.

    It makes one lookup per service with an entry. A walk would read unused entries, too.
    """
    for id_, name in {0: _OTHER, **names}.items():
        value = of.lookup(_U32.pack(id_)) if id_ < of.shape.max_entries else None
        if value and any(value):
            protocol = protocol_name(name.protocol) if name.protocol else ""
            yield ServiceTraffic(
                name.text, protocol, (name.family and f"IPv{name.family}") or "", *_summed(value)
            )


def counts_services(of: Map) -> bool:
    """Whether the traffic of any service is counted separately (--ebpf-traffic-max)."""
    return of.shape.max_entries > 1


def _summed(value: bytes) -> Sequence[int]:
    words = memoryview(value).cast("Q")
    return [sum(words[start::_WORDS]) for start in range(_WORDS)]


class Readings:
    """Reads pinned maps through its own file descriptors. For any thread. Close with `close`.

    All methods raise KernelError; after `close`, NotFound.
    """

    _NAMES = ("counters", "traffic", "service_names")

    def __init__(self, maps: Path) -> None:
        """`maps`: the directory where they are pinned. Raises NotFound."""
        self._lock = threading.Lock()  # a Map has only one buffer for keys and values
        self._maps: dict[str, Map] = {}
        try:
            for name in self._NAMES:
                self._maps[name] = Map.pinned(maps / name)
        except BaseException:
            self.close()
            raise

    def counters(self) -> dict[str, int]:
        """Events by abi.h's enum counter, summed over the CPUs."""
        with self._lock:
            return {name: sum(values) for name, values in events(self._opened("counters")).items()}

    def traffic(self) -> list[ServiceTraffic]:
        """The traffic of all services that have had any, in no order."""
        with self._lock:
            return list(traffic(self._opened("traffic"), service_names(self._opened("service_names"))))

    def _opened(self, name: str) -> Map:
        if name not in self._maps:
            raise NotFound(f"map {name} is closed")
        return self._maps[name]

    def close(self) -> None:
        with self._lock:
            for opened in self._maps.values():
                opened.close()
            self._maps.clear()
