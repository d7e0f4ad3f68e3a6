"""``ebpfproxy dump``"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ebpfproxy.config import FlagsCommand, options
from ebpfproxy.errors import ConfigError
from ebpfproxy.model.address import parse_address

if TYPE_CHECKING:
    from ebpfproxy.dataplanes.ebpf.view import View

Row = dict[str, Any]

_SHOWN_ENDPOINTS = 4  # in a table's cell; json and yaml have them all


class Filter(NamedTuple):
    """What --service and --address ask for: namespace/name with or without :port, and an address with
    or without a port; empty and None where not asked."""

    service: str
    address: str
    port: int | None

    def admits(self, row: Row) -> bool:
        service = row["service"]
        if self.service and service != self.service and service.partition(":")[0] != self.service:
            return False
        return not self.address or any(self._is_it(place) for place in _places(row))

    def _is_it(self, place: tuple[str, int | None]) -> bool:
        address, port = place
        return address == self.address and (self.port is None or port is None or port == self.port)


@click.command("dump", cls=FlagsCommand)
@click.argument(
    "what", type=click.Choice(["services", "endpoints", "affinity", "sockets", "all"]), default="services"
)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", help="How it is shown."
)
@click.option("--service", metavar="NS/NAME[:PORT]", default="", help="Only what belongs to this Service.")
@click.option(
    "--address",
    metavar="IP[:PORT]",
    default="",
    help="Only what has this address, as frontend or endpoint; [IP]:PORT for IPv6.",
)
@options("bpffs_root")
def command(what: str, output: str, service: str, address: str, bpffs_root: Path) -> None:
    """Show what the kernel's maps hold: services (the default), endpoints, affinity, sockets or all.

    Only the pinned maps are read, so this works whether the agent runs or not, and shows what the
    kernel really does.
    """
    from ebpfproxy.dataplanes.ebpf.view import View

    wanted = Filter(service, *_parse_place(address))
    with contextlib.closing(View(bpffs_root)) as view:
        parts = {part: _rows(view, part, wanted) for part in _PARTS if what in (part, "all")}
        if what == "all":
            parts["counters"] = [{"counter": name, "value": n} for name, n in view.counters().items()]
            parts["maps"] = [
                {"map": name, "entries": used, "room": room} for name, (used, room) in view.usage().items()
            ]
    _WRITERS[output](parts if what == "all" else parts[what], what)


_PARTS: dict[str, Callable[["View"], Iterable[Any]]] = {
    "services": lambda view: view.services(),
    "endpoints": lambda view: view.endpoints(),
    "affinity": lambda view: view.affinity(),
    "sockets": lambda view: view.sockets(),
}


def _rows(view: "View", part: str, wanted: Filter) -> list[Row]:
    rows: list[Row] = [row._asdict() for row in _PARTS[part](view)]
    return [row for row in rows if wanted.admits(row)]


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


def _places(row: Row) -> Iterable[tuple[str, int | None]]:
    """Every address with its port that a row names."""
    if "port" in row:
        yield row["address"], row["port"]
    for field in ("internal", "external", "dialed", "endpoint"):
        value = row.get(field, ())
        for text in [value] if isinstance(value, str) else value:
            yield _parse_place(text.partition(" ")[0])


def _write_json(content: Any, what: str) -> None:
    click.echo(json.dumps(content, indent=2))


def _write_yaml(content: Any, what: str) -> None:
    import yaml

    click.echo(yaml.safe_dump(content, sort_keys=False), nl=False)


def _write_table(content: Any, what: str) -> None:
    from rich.console import Console

    # Piped, a table is as wide as it needs to be, so that grep finds whole lines.
    console = Console(width=None if sys.stdout.isatty() else 400, highlight=False)
    for name, rows in content.items() if what == "all" else [(what, content)]:
        if rows:
            console.print(_table(name, rows, titled=what == "all"))
        else:
            console.print(f"{name}: none")


def _table(name: str, rows: list[Row], titled: bool) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=name if titled else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    lines = [_line(row) for row in rows]
    for column in _columns(lines):
        justify = "right" if isinstance(lines[0][column], int | float) else "left"
        table.add_column(column.upper().replace("_", " "), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for line in lines:
        table.add_row(*(Text(_cell(line[column])) for column in _columns(lines)))  # [fd00::1] is no markup
    return table


def _line(row: Row) -> Row:
    """A row as a table shows it: what json and yaml tell apart is put together where that is shorter."""
    line = {key: value for key, value in row.items() if key != "id"}
    if "port" in line:
        address = line["address"]
        line["address"] = f"[{address}]:{line['port']}" if ":" in address else f"{address}:{line['port']}"
        del line["port"]
    if "internal" in line:
        external = line.pop("external")
        line = {("endpoints" if key == "internal" else key): value for key, value in line.items()}
        line["external"] = [] if external == row["internal"] else external or ["none"]
        line["affinity"] = f"{row['affinity']} s" if row["affinity"] else ""
        line["flags"] = [flag for flag in row["flags"] if not flag.startswith("masquerade")]
        line["masquerade"] = [
            f.removeprefix("masquerade-") for f in row["flags"] if f.startswith("masquerade")
        ]
    return line


def _columns(lines: list[Row]) -> list[str]:
    """Those that have something to show in some line."""
    return [column for column in lines[0] if any(_cell(line[column]) for line in lines)]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list):
        shown = ", ".join(value[:_SHOWN_ENDPOINTS])
        return shown + (f" and {len(value) - _SHOWN_ENDPOINTS} more" if len(value) > _SHOWN_ENDPOINTS else "")
    return str(value)


_WRITERS: dict[str, Callable[[Any, str], None]] = {
    "table": _write_table,
    "json": _write_json,
    "yaml": _write_yaml,
}
