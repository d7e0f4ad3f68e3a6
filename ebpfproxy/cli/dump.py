"""``ebpfproxy dump``"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ebpfproxy.cli.rows import WRITERS, Row
from ebpfproxy.config import FlagsCommand, options
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import parse_address

if TYPE_CHECKING:
    from ebpfproxy.backends.ebpf.inspect.tables import View

_PLACES = (
    *("internal", "external", "dialed", "endpoint"),
    *("client", "frontend", "masquerade"),
    *("source", "destination", "new_source", "new_destination"),
)
"""Columns that name addresses, with or without port, beside "address" and "port"."""


class Filter(NamedTuple):
    """What --service and --address ask for: namespace/name with or without :port, and an address with
    or without a port; empty and None where not asked."""

    service: str
    address: str
    port: int | None

    def admits(self, row: Row) -> bool:
        if self.service:
            service = row["service"]
            if service != self.service and service.partition(":")[0] != self.service:
                return False
        return not self.address or any(map(self._is_it, _places(row)))

    def _is_it(self, text: str) -> bool:
        """Whether a place is the one asked for: canonical text, without a port where it stands for all."""
        host = f"[{self.address}]:" if ":" in self.address else f"{self.address}:"
        if self.port is None:
            return text == self.address or text.startswith(host)
        return text in (self.address, f"{host}{self.port}")


class _Part(NamedTuple):
    """`by_service` and `by_address`: whether its rows can be chosen so."""

    rows: Callable[["View"], Iterable[Any]]
    by_service: bool = True
    by_address: bool = True

    def knows(self, wanted: Filter) -> bool:
        return (self.by_service or not wanted.service) and (self.by_address or not wanted.address)


class _MapRow(NamedTuple):
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
_WHAT = {
    **{
        name: (name,)
        for name in ("services", "endpoints", "affinity", "sockets", "conntrack", "nat", "devices")
    },
    "counters": ("counters", "traffic"),
    "all": tuple(_PARTS),
}


@click.command("dump", cls=FlagsCommand)
@click.argument("what", type=click.Choice(list(_WHAT)), default="services")
@click.option("-o", "--output", type=click.Choice(list(WRITERS)), default="table", help="How it is shown.")
@click.option("--service", metavar="NS/NAME[:PORT]", default="", help="Only what belongs to this Service.")
@click.option(
    "--address",
    metavar="IP[:PORT]",
    default="",
    help="Only what has this address, as client, frontend or endpoint; [IP]:PORT for IPv6.",
)
@options("bpffs_root")
def command(what: str, output: str, service: str, address: str, bpffs_root: Path) -> None:
    """Show the content of the BPF maps: services (default), endpoints, affinity and sockets; flows of the
    packet path (conntrack), their translation (nat) and devices; counters, with the traffic of each Service;
    or all of these.

    Reads only the pinned maps, so it works with and without a running agent.
    """
    from ebpfproxy.backends.ebpf.inspect.tables import View

    wanted = Filter(service, *_parse_place(address))
    parts = [part for part in _WHAT[what] if _PARTS[part].knows(wanted)]
    if not parts:
        raise ConfigError(
            f"{what} cannot be chosen by {'--service' if service else '--address'}", "leave that option out"
        )
    with contextlib.closing(View(bpffs_root)) as view:
        WRITERS[output](((part, _rows(view, part, wanted)) for part in parts), len(_WHAT[what]) > 1)


def _rows(view: "View", part: str, wanted: Filter) -> Iterator[Row]:
    rows = (row._asdict() for row in _PARTS[part].rows(view))
    return filter(wanted.admits, rows) if wanted.service or wanted.address else rows


def _parse_place(text: str) -> tuple[str, int | None]:
    """ "10.0.0.1", "10.0.0.1:80", "fd00::1", "[fd00::1]" or "[fd00::1]:80", canonical.

    >>> _parse_place("[fd00:0::1]"), _parse_place("[fd00::1]:80"), _parse_place("fd00::1:80")
    (('fd00::1', None), ('fd00::1', 80), ('fd00::1:80', None))

    Raises ConfigError.
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
            f"--address: {text!r} is no address", "such as 10.96.0.1, 10.96.0.1:443 or [fd00::1]:443"
        ) from None


def _places(row: Row) -> Iterator[str]:
    """Every address that a row names, with its port where it has one."""
    if "port" in row:
        address = row["address"]
        yield f"[{address}]:{row['port']}" if ":" in address else f"{address}:{row['port']}"
    for column in _PLACES:
        value = row.get(column, ())
        for text in (value,) if isinstance(value, str) else value:
            yield text.partition(" ")[0]
