"""``ebpfproxy dump``: shows the content of the BPF maps."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.rows import WRITERS, Row
from ebpfproxy.cli.service_names import complete_service
from ebpfproxy.config import FlagsCommand, options
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import parse_address

if TYPE_CHECKING:
    from ebpfproxy.backends.ebpf.inspect.tables import View

_ADDRESS_COLUMNS = (
    *("internal", "external", "endpoint"),
    *("client", "frontend", "masquerade"),
    *("source", "destination", "new_source", "new_destination"),
)
"""Columns with addresses, with or without port, besides "address" and "port"."""


class Filter(NamedTuple):
    """The values of --service and --address: namespace/name with or without :port, and address and port.

    Texts are "" and the port is None if not given.
    """

    service: str
    address: str
    port: int | None

    def admits(self, row: Row) -> bool:
        """Whether the row matches the filter."""
        if self.service:
            service = row["service"]
            if service != self.service and service.partition(":")[0] != self.service:
                return False
        return not self.address or any(map(self._matches_address, _addresses(row)))

    def _matches_address(self, text: str) -> bool:
        """Whether an address in canonical text, with or without port, matches --address."""
        host = f"[{self.address}]:" if ":" in self.address else f"{self.address}:"
        if self.port is None:
            return text == self.address or text.startswith(host)
        return text in (self.address, f"{host}{self.port}")


class _Part(NamedTuple):
    """A section of the output. `by_service`, `by_address`: whether its rows can be filtered so."""

    rows: Callable[["View"], Iterable[Any]]
    by_service: bool = True
    by_address: bool = True

    def supports(self, row_filter: Filter) -> bool:
        return (self.by_service or not row_filter.service) and (self.by_address or not row_filter.address)


class _MapRow(NamedTuple):
    """A map with its number of entries and its maximum."""

    map: str
    entries: int
    room: int


_PARTS = {
    "services": _Part(lambda view: view.services()),
    "endpoints": _Part(lambda view: view.endpoints()),
    "affinity": _Part(lambda view: view.affinity()),
    "sockets": _Part(lambda view: view.sockets()),
    "conntrack": _Part(lambda view: view.conntrack()),
    "nat": _Part(lambda view: view.nat()),
    "devices": _Part(lambda view: view.devices(), by_service=False),
    "counters": _Part(lambda view: view.counters(), by_service=False, by_address=False),
    "traffic": _Part(lambda view: view.traffic(), by_address=False),
    "maps": _Part(
        lambda view: (_MapRow(name, *use) for name, use in view.usage().items()),
        by_service=False,
        by_address=False,
    ),
}
_SUBJECTS = {
    **{
        name: (name,)
        for name in ("services", "endpoints", "affinity", "sockets", "conntrack", "nat", "devices")
    },
    "counters": ("counters", "traffic"),
    "all": tuple(_PARTS),
}


_NOT_COUNTED = "note: traffic is not counted by Service: the agent runs with --ebpf-traffic-max=0"


@click.command(
    "dump",
    cls=FlagsCommand,
    epilog=examples("""
    # Show all frontends and their endpoints.
    ebpfproxy dump
    # Show the flows of one Service.
    ebpfproxy dump conntrack --service=default/web
    # Find the Service of an address.
    ebpfproxy dump --address=10.96.0.10:80 -o yaml
    """),
)
@click.argument("what", type=click.Choice(list(_SUBJECTS)), default="services", metavar="WHAT")
@click.option(
    "-o",
    "--output",
    type=click.Choice(list(WRITERS)),
    default="table",
    show_default=True,
    help="Output format.",
)
@click.option(
    "--service",
    metavar="NS/NAME[:PORT]",
    shell_complete=complete_service,
    default="",
    help="Show only entries of this Service, or of one of its ports. Empty: all Services.",
)
@click.option(
    "--address",
    metavar="IP[:PORT]",
    default="",
    help="Show only entries with this address as client, frontend or endpoint. Write IPv6 with a port as "
    "[IP]:PORT. Empty: all addresses.",
)
@options("bpffs_root")
def command(what: str, output: str, service: str, address: str, bpffs_root: Path) -> None:
    """Show the content of the BPF maps of mode ebpf. WHAT is one of:

    \b
    services   frontends and their endpoints; this is the default
    endpoints  endpoints, and the connections that can select them
    affinity   clients with session affinity
    sockets    sockets that were redirected to an endpoint
    conntrack  flows of the packet path
    nat        translation steps of these flows
    devices    devices of the packet path, and the programs on them
    counters   events in the programs, and traffic (by Service with --ebpf-traffic-max)
    all        all of these, and the use of each map

    Reads only the pinned maps, so it works with and without a running agent.
    """
    from ebpfproxy.backends.ebpf.inspect.tables import View

    row_filter = Filter(service, *_parse_address_filter(address))
    parts = [part for part in _SUBJECTS[what] if _PARTS[part].supports(row_filter)]
    if not parts:
        flag = "--service" if service else "--address"
        raise ConfigError(f"cannot filter {what} by {flag}", f"leave {flag} out")
    with contextlib.closing(View(bpffs_root)) as view:
        if "traffic" in parts and not view.counts_services:
            click.echo(_NOT_COUNTED, err=True)
        WRITERS[output](((part, _rows(view, part, row_filter)) for part in parts), len(_SUBJECTS[what]) > 1)


def _rows(view: "View", part: str, row_filter: Filter) -> Iterator[Row]:
    rows = (row._asdict() for row in _PARTS[part].rows(view))
    return filter(row_filter.admits, rows) if row_filter.service or row_filter.address else rows


def _parse_address_filter(text: str) -> tuple[str, int | None]:
    """Parse "10.0.0.1", "10.0.0.1:80", "fd00::1", "[fd00::1]" or "[fd00::1]:80"; the address is canonical.

    >>> [_parse_address_filter(text) for text in ("[fd00:0::1]", "[fd00::1]:80", "fd00::1:80")]
    [('fd00::1', None), ('fd00::1', 80), ('fd00::1:80', None)]

    Returns "" and None for the empty text. Raises ConfigError.
    """
    from ebpfproxy.model.address import format_address

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
