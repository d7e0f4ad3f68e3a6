"""``ebpfproxy dump --watch``: the rows at the beginning, then their changes, one line each."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import click

from ebpfproxy.cli.rows import Row
from ebpfproxy.cli.terminal import console

_KEYS: Mapping[str, tuple[str, ...]] = {
    "services": ("address", "port", "protocol", "family"),
    "endpoints": ("service", "protocol", "address", "port"),
    "ranges": ("service", "network"),
    "affinity": ("service", "client"),
    "sockets": ("cookie", "protocol", "frontend", "endpoint"),
    "conntrack": ("protocol", "client", "frontend"),
    "nat": ("protocol", "side", "source", "destination"),
    "devices": ("ifindex",),
    "networks": ("network",),
    "settings": ("setting",),
    "counters": ("counter",),
    "traffic": ("service", "protocol", "family"),
    "maps": ("map",),
    "objects": ("object",),
}
"""The columns that identify a row, by section. If other columns change, the row changes."""

_CLOCKS = ("age", "left", "internal_slots", "external_slots", "per_cpu")
"""Columns whose change is no change of the row. Lists of endpoints get other slots at each change."""

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_STYLES = {"added": "green", "removed": "red", "changed": "yellow"}

INITIAL = "initial"
"""`Change.change` of the rows at the beginning."""

Reading = Mapping[str, Iterable[Row]]
"""The rows of each section."""


class Change(NamedTuple):
    """A change of one row. `change`: "added", "removed", "changed" or INITIAL. `previous`: the columns that
    changed, with their previous values."""

    change: str
    section: str
    row: Row
    previous: Row


class Rows:
    """The rows of a reading, to compare later readings with."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[Any, ...]], Row] = {}

    def read(self, reading: Reading) -> list[Change]:
        """Return what changed since the previous reading: removed rows, then the others in their order."""
        previous, self._known = self._known, {}
        changes: list[Change] = []
        for section, rows in reading.items():
            for row in rows:
                key = section, tuple(row[column] for column in _KEYS[section])
                self._known[key] = row
                before = previous.pop(key, None)
                if before is None:
                    changes.append(Change("added", section, row, {}))
                elif differences := _differences(before, row):
                    changes.append(Change("changed", section, row, differences))
        removed = [Change("removed", section, row, {}) for (section, _), row in previous.items()]
        return removed + changes


def _differences(before: Row, after: Row) -> Row:
    return {
        column: value
        for column, value in before.items()
        if column not in _CLOCKS and value != after.get(column)
    }


def follow(
    read: Callable[[], Reading], interval: float, show_first: Callable[[Reading], object], output: str
) -> None:
    """Show the first reading, then compare it with another one every `interval` seconds, until an interrupt.

    `output`: "json" for one JSON object per line, else text. If a later `read` returns nothing, the previous
    reading stays.
    """
    known = Rows()
    first = {section: list(rows) for section, rows in read().items()}
    known.read(first)
    if output == "json":
        _write_json([Change(INITIAL, name, row, {}) for name, rows in first.items() for row in rows])
    else:
        show_first(first)
    while True:
        time.sleep(interval)
        reading = read()
        if not reading:
            continue
        changes = known.read(reading)
        (_write_json if output == "json" else _write_text)(changes)


def _write_json(changes: Iterable[Change]) -> None:
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    for change in changes:
        click.echo(json.dumps({"time": now, **change._asdict()}))


def _write_text(changes: Iterable[Change]) -> None:
    from rich.text import Text

    output = console(piped_width=10_000)
    now = datetime.now().strftime("%H:%M:%S")
    for change in changes:
        text = f"{now} {_SIGNS[change.change]} {change.section} {' '.join(_words(change))}"
        output.print(Text(text, _STYLES[change.change]), soft_wrap=True)


def _words(change: Change) -> Iterator[str]:
    """The columns as column=value. Of a changed row: the key, and what changed as column=old -> new."""
    keys = _KEYS[change.section]
    shown = (
        change.row
        if change.change != "changed"
        else {"service": "", **dict.fromkeys((*keys, *change.previous))}
    )
    for column in shown:
        value = change.row.get(column)
        if column in change.previous:
            yield f"{column}={_word(change.previous[column])} -> {_word(value)}"
        elif column not in _CLOCKS and value not in ("", [], False, None):
            yield f"{column}={_word(value)}"


def _word(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value) or "none"
