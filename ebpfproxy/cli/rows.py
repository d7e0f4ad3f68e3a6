"""How rows are shown: as a table, json or yaml. They are taken as they come, and there may be many."""

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

Row = dict[str, Any]
Sections = Iterable[tuple[str, Iterable[Row]]]

_SHOWN = 4  # of a list, in a table's cell; json and yaml have all of it
_LAID_OUT = 2000  # rows: a table of more is written as it comes, its columns as wide as those rows need
_CHUNK = 1000


def _chunks(rows: Iterable[Row], size: int = _CHUNK) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk


def _write_json(sections: Sections, titled: bool) -> None:
    """A list of objects; of more than one section, an object of such lists."""
    inner = "  " if titled else ""
    for number, (name, rows) in enumerate(sections):
        if titled:
            click.echo(f"{',' if number else '{'}\n  {json.dumps(name)}: ", nl=False)
        for piece in _json_list(rows, inner):
            click.echo(piece, nl=False)
    click.echo("\n}" if titled else "")


def _json_list(rows: Iterable[Row], inner: str) -> Iterator[str]:
    from msgspec.json import encode, format  # json's own takes a minute for a million rows with indent

    before = "["
    for chunk in _chunks(rows):
        text = format(encode(chunk), indent=2).decode()
        yield before + text[1:-2].replace("\n", f"\n{inner}")
        before = ","
    yield "[]" if before == "[" else f"\n{inner}]"


def _write_yaml(sections: Sections, titled: bool) -> None:
    import yaml

    class Plain(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        """Without anchors for what rows share: each chunk would have the same ones."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    for name, rows in sections:
        beginning: Any = []
        for chunk in _chunks(rows):
            content = {name: chunk} if titled and beginning == [] else chunk
            beginning = None
            click.echo(yaml.dump(content, Dumper=Plain, sort_keys=False), nl=False)
        if beginning == []:
            click.echo(f"{name}: []" if titled else "[]")


def _write_table(sections: Sections, titled: bool) -> None:
    from rich.console import Console

    # Piped, a table is as wide as it needs to be, so that grep finds whole lines.
    console = Console(width=None if sys.stdout.isatty() else 400, highlight=False)
    for name, rows in sections:
        remaining = map(_line, rows)
        lines = list(itertools.islice(remaining, _LAID_OUT))
        if not lines:
            console.print(f"{name}: none")
        elif len(lines) < _LAID_OUT:
            console.print(_table(name, lines, titled))
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
        table.add_row(*(Text(_cell(line[column])) for column in _columns(lines)))  # [fd00::1] is no markup
    return table


def _stream(name: str, lines: list[Row], more: Iterator[Row], titled: bool) -> None:
    """All columns, since a later line may need them."""
    columns = list(lines[0])
    widths = [max(len(_heading(c)), *(len(_cell(line[c])) for line in lines)) for c in columns]
    aligns = [">" if _is_number(lines[0][c]) else "<" for c in columns]
    layout = " ".join(f"{{:{a}{w}}}" for a, w in zip(aligns, widths, strict=True))
    if titled:
        click.echo(name)
    click.echo(layout.format(*map(_heading, columns)).rstrip())
    for chunk in _chunks(itertools.chain(lines, more)):
        shown = (layout.format(*map(_cell, line.values())).rstrip() for line in chunk)
        click.echo("\n".join(shown))
    click.echo()


def _line(row: Row) -> Row:
    """A row as a table shows it: what json and yaml tell apart is put together where that is shorter."""
    line = {key: value for key, value in row.items() if key not in ("id", "per_cpu")}
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


def _heading(column: str) -> str:
    return column.upper().replace("_", " ")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list):
        shown = ", ".join(value[:_SHOWN])
        return shown + (f" and {len(value) - _SHOWN} more" if len(value) > _SHOWN else "")
    return str(value)


WRITERS: dict[str, Callable[[Sections, bool], None]] = {
    "table": _write_table,
    "json": _write_json,
    "yaml": _write_yaml,
}
"""By the name of --output. The second argument: whether sections are distinguished by their names."""
