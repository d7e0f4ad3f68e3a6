"""Writers of rows: table, json and yaml. Rows are streamed, because there may be very many."""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from ebpfproxy.cli.terminal import console

Row = dict[str, Any]
Sections = Iterable[tuple[str, Iterable[Row]]]

_MAX_LIST_ITEMS = 4  # of a list in a table's cell; json and yaml have the complete list
_MAX_TABLE_ROWS = 2000  # a longer table is streamed; the first rows determine its column widths
_CHUNK = 1000
_IDS = (
    *("id", "service_id", "endpoint_id", "internal_slots", "external_slots", "ifindex", "cookie", "per_cpu"),
    "family",
)
"""Columns that a table without -o wide leaves out."""
_STYLES = {"orphaned": "yellow", "drifted": "red"}
"""The style of a column on terminals."""


def _chunks(rows: Iterable[Row], size: int = _CHUNK) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk


def _write_json(sections: Sections, titled: bool, header: Row | None = None) -> None:
    """Write a list of objects; if `titled`, an object with a list for each section, after the header."""
    inner = "  " if titled else ""
    if header:
        text = json.dumps(header, indent=2).replace("\n", "\n  ")
        click.echo(f'{{\n  "header": {text}', nl=False)
    for number, (name, rows) in enumerate(sections, bool(header)):
        if titled:
            click.echo(f"{',' if number else '{'}\n  {json.dumps(name)}: ", nl=False)
        for piece in _json_list(rows, inner):
            click.echo(piece, nl=False)
    click.echo("\n}" if titled else "")


def _json_list(rows: Iterable[Row], inner: str) -> Iterator[str]:
    from msgspec.json import encode, format  # the json module takes a minute for a million indented rows

    before = "["
    for chunk in _chunks(rows):
        text = format(encode(chunk), indent=2).decode()
        yield before + text[1:-2].replace("\n", f"\n{inner}")
        before = ","
    yield "[]" if before == "[" else f"\n{inner}]"


def _write_yaml(sections: Sections, titled: bool, header: Row | None = None) -> None:
    import yaml

    class Plain(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """A dumper without anchors: their names would repeat in each chunk."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    if header:
        click.echo(yaml.dump({"header": header}, Dumper=Plain, sort_keys=False), nl=False)
    for name, rows in sections:
        beginning: Any = []
        for chunk in _chunks(rows):
            content = {name: chunk} if titled and beginning == [] else chunk
            beginning = None
            click.echo(yaml.dump(content, Dumper=Plain, sort_keys=False), nl=False)
        if beginning == []:
            click.echo(f"{name}: []" if titled else "[]")


def _write_table(sections: Sections, titled: bool, header: Row | None = None) -> None:
    _write_lines(sections, titled, lambda _, row: narrow(row))


def _write_wide(sections: Sections, titled: bool, header: Row | None = None) -> None:
    from ebpfproxy.backends.ebpf.inspect.raw_keys import raw_key

    def with_key(section: str, row: Row) -> Row:
        key = raw_key(section, row)
        return wide(row) if key is None else {**wide(row), "key": key.hex(" ")}

    _write_lines(sections, titled, with_key)


def _write_lines(sections: Sections, titled: bool, line_of: Callable[[str, Row], Row]) -> None:
    # If it is piped, a table has a fixed width that wraps no line, so that grep finds complete rows.
    output = console(piped_width=400)
    for name, rows in sections:
        remaining = map(functools.partial(line_of, name), rows)
        lines = list(itertools.islice(remaining, _MAX_TABLE_ROWS))
        if not lines:
            output.print(f"{name}: none")
        elif len(lines) < _MAX_TABLE_ROWS:
            output.print(_table(name, lines, titled))
        else:
            _stream(name, lines, remaining, titled)


def _table(name: str, lines: list[Row], titled: bool) -> Any:
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
    for column in _columns(lines):
        justify = "right" if _is_number(lines[0][column]) else "left"
        table.add_column(_heading(column), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for line in lines:
        # [fd00::1] is not markup.
        table.add_row(*(Text(_cell(line[column]), _STYLES.get(column, "")) for column in _columns(lines)))
    return table


def _stream(name: str, lines: list[Row], more: Iterator[Row], titled: bool) -> None:
    """Write a long table. It has all columns, because a later row may need them."""
    columns = list(lines[0])
    widths = [max(len(_heading(c)), *(len(_cell(line[c])) for line in lines)) for c in columns]
    aligns = [">" if _is_number(lines[0][c]) else "<" for c in columns]
    layout = " ".join(f"{{:{a}{w}}}" for a, w in zip(aligns, widths, strict=True))
    if titled:
        click.echo(name)
    click.echo(layout.format(*map(_heading, columns)).rstrip())
    for chunk in _chunks(itertools.chain(lines, more)):
        formatted = (layout.format(*map(_cell, line.values())).rstrip() for line in chunk)
        click.echo("\n".join(formatted))
    click.echo()


def wide(row: Row) -> Row:
    """Convert a row for a table: join address and port."""
    line = dict(row)
    if "port" in line:
        address = line["address"]
        line["address"] = f"[{address}]:{line['port']}" if ":" in address else f"{address}:{line['port']}"
        del line["port"]
    return line


def narrow(row: Row) -> Row:
    """Convert a row for a table: leave ids out, and shorten what json and yaml list separately."""
    line = {key: value for key, value in wide(row).items() if key not in _IDS}
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
    """Return the columns that are not empty in every row."""
    return [column for column in lines[0] if any(_cell(line[column]) for line in lines)]


def _heading(column: str) -> str:
    return column.upper().replace("_", " ")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list):
        text = ", ".join(map(str, value[:_MAX_LIST_ITEMS]))
        further = len(value) - _MAX_LIST_ITEMS
        return text + (f" and {further} more" if further > 0 else "")
    return str(value)


WRITERS: dict[str, Callable[[Sections, bool, Row | None], None]] = {
    "table": _write_table,
    "wide": _write_wide,
    "json": _write_json,
    "yaml": _write_yaml,
}
"""The writers by the value of --output.

Their second argument: whether sections get their names as titles. Their third one: the header of titled json
and yaml, None for none. A table has no header.
"""
