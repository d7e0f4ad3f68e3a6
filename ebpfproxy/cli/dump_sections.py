"""The sections of a dump, the values of WHAT, and the filters --service and --address."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ebpfproxy.cli.rows import Row
from ebpfproxy.config import Config
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import contains, format_address, parse_address, parse_network

if TYPE_CHECKING:
    from ebpfproxy.backends.ebpf.inspect.view import DumpView

_ADDRESS_COLUMNS = (
    *("internal", "external", "endpoint"),
    *("client", "frontend", "masquerade"),
    *("source", "destination", "new_source", "new_destination"),
)
"""Columns with addresses, with or without port, besides "address" and "port"."""


_MOST_CONNECTIONS = 100_000  # of each relay


class Filter(NamedTuple):
    """The values of --service and --address: namespace/name with or without :port, and address and port.

    Texts are "" and the port is None if not given.
    """

    service: str
    address: str
    port: int | None

    def flags(self) -> list[str]:
        """The flags as they were given, empty if there are none."""
        host = self.address if self.port is None else f"{self.address}:{self.port}"
        if ":" in self.address and self.port is not None:
            host = f"[{self.address}]:{self.port}"
        texts = {"--service": self.service, "--address": host if self.address else ""}
        return [f"{flag}={text}" for flag, text in texts.items() if text]

    def admits(self, row: Row) -> bool:
        """Whether the row matches the filter."""
        if self.service:
            service = row["service"]
            if service != self.service and service.partition(":")[0] != self.service:
                return False
        if not self.address:
            return True
        if "network" in row:
            return contains(parse_network(row["network"]), parse_address(self.address))
        return any(map(self._matches_address, _addresses(row)))

    def _matches_address(self, text: str) -> bool:
        """Whether an address in canonical text, with or without port, matches --address."""
        host = f"[{self.address}]:" if ":" in self.address else f"{self.address}:"
        if self.port is None:
            return text == self.address or text.startswith(host)
        return text in (self.address, f"{host}{self.port}")


class Section(NamedTuple):
    """A section of a dump. `by_service`, `by_address`: whether its rows can be filtered so."""

    rows: Callable[["DumpView"], Iterable[Any]]
    by_service: bool = True
    by_address: bool = True

    def supports(self, row_filter: Filter) -> bool:
        """Whether its rows can be filtered so."""
        return (self.by_service or not row_filter.service) and (self.by_address or not row_filter.address)


SECTIONS = {
    "services": Section(lambda view: view.services()),
    "endpoints": Section(lambda view: view.endpoints()),
    "ranges": Section(lambda view: view.ranges()),
    "affinity": Section(lambda view: view.affinity()),
    "sockets": Section(lambda view: view.sockets()),
    "conntrack": Section(lambda view: view.conntrack()),
    "nat": Section(lambda view: view.nat()),
    "devices": Section(lambda view: view.devices(), by_service=False),
    "networks": Section(lambda view: view.networks(), by_service=False),
    "settings": Section(lambda view: view.settings(), by_service=False, by_address=False),
    "counters": Section(lambda view: view.counters(), by_service=False, by_address=False),
    "traffic": Section(lambda view: view.traffic(), by_address=False),
    "maps": Section(lambda view: view.maps(), by_service=False, by_address=False),
}
SUBJECTS = {
    **{name: (name,) for name in SECTIONS if name != "traffic"},
    "counters": ("counters", "traffic"),
    "all": tuple(SECTIONS),
}
"""The sections of each WHAT."""


def rows(view: "DumpView", section: str, row_filter: Filter) -> Iterator[Row]:
    """The rows of a section that the filter admits."""
    found = (row._asdict() for row in SECTIONS[section].rows(view))
    return filter(row_filter.admits, found) if row_filter.service or row_filter.address else found


def connections(row_filter: Filter) -> list[Row]:
    """The open connections of relays that the filter admits."""
    from ebpfproxy.backends.userspace import inspection

    found = (each._asdict() for each in inspection.connections(_MOST_CONNECTIONS))
    return [row for row in found if row_filter.admits(row)]


def namespaces(config: Config) -> list[Row]:
    """The network namespaces that may be those of pods, and the path of their sockets. Raises KernelError."""
    from ebpfproxy.backends.ebpf.inspect import namespace_view

    found = namespace_view.namespaces(config.bpffs_root, config.proc_root, config.cgroup_root)
    return [each._asdict() for each in found]


def parse_address_filter(text: str) -> tuple[str, int | None]:
    """Parse "10.0.0.1", "10.0.0.1:80", "fd00::1", "[fd00::1]" or "[fd00::1]:80"; the address is canonical.

    >>> [parse_address_filter(text) for text in ("[fd00:0::1]", "[fd00::1]:80", "fd00::1:80")]
    [('fd00::1', None), ('fd00::1', 80), ('fd00::1:80', None)]

    Returns "" and None for the empty text. Raises ConfigError.
    """
    if not text:
        return "", None
    head, colon, tail = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in head and not text.startswith("[")):
        head, tail = text, ""
    try:
        port = int(tail) if tail else None
        return format_address(parse_address(head.strip("[]"))), port
    except ValueError:
        raise ConfigError(
            f"--address: {text!r} is not an address", "write 10.96.0.1, 10.96.0.1:443 or [fd00::1]:443"
        ) from None


def _addresses(row: Row) -> Iterator[str]:
    """Yield every address in a row, with its port if it has one."""
    if "port" in row:
        address = row["address"]
        yield f"[{address}]:{row['port']}" if ":" in address else f"{address}:{row['port']}"
    for column in _ADDRESS_COLUMNS:
        value = row.get(column, ())
        for text in (value,) if isinstance(value, str) else value:
            yield text.partition(" ")[0]
