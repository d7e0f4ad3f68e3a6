"""``ebpfproxy dump --diff``, ``--drift`` and ``dump objects``: the state of a mode beside the desired one."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ebpfproxy.cli.dump_source import compared, inspectable
from ebpfproxy.cli.rows import Row
from ebpfproxy.cli.terminal import console, progress

if TYPE_CHECKING:
    from ebpfproxy.config import Config
    from ebpfproxy.diagnose.changes import Diff, ObjectDiff

_READING = "comparing the kernel with the cluster"


def read(config: "Config", from_dump: Path | None) -> "Diff":
    """Compare the kernel, or a saved dump, with the cluster, in the mode in use. Raises EbpfProxyError."""
    from ebpfproxy.diagnose.changes import diff

    with progress(_READING):
        mode, result = compared(config, from_dump)
        return diff(mode, config, result)


def objects(config: "Config", from_dump: Path | None) -> Callable[[], list[Row]]:
    """Return a function that reads all objects of the mode in use. It raises KernelError."""
    from ebpfproxy.diagnose.changes import entries

    mode = inspectable(config, from_dump)
    return lambda: [{"object": name, "content": lines} for name, lines in entries(mode, config)]


def show(found: "Diff", output: str) -> None:
    """Print the objects that differ. A line with - is only in the kernel, a line with + only desired."""
    content = {**found._asdict(), "objects": [each._asdict() for each in found.objects]}
    if output == "json":
        click.echo(json.dumps(content, indent=2))
        return
    if output == "yaml":
        import yaml

        click.echo(yaml.safe_dump(content, sort_keys=False), nl=False)
        return
    _print(line for each in found.objects for line in _lines(each))
    count = len(found.objects)
    summary = f"{count} object{'' if count == 1 else 's'} differ{'s' if count == 1 else ''}"
    click.echo(f"mode {found.mode}: {summary if count else 'no differences'}, {found.compared} compared")


def _lines(each: "ObjectDiff") -> Iterator[tuple[str, str]]:
    """Text, and its style."""
    sign, style = {"missing": ("+ ", "green"), "unexpected": ("- ", "red")}.get(each.state, ("", ""))
    yield f"{sign or '~ '}{each.object}" + (f": {each.detail}" if each.detail else ""), style
    for line in each.actual:
        yield f"-   {line}", "red"
    for line in each.desired:
        yield f"+   {line}", "green"


def _print(lines: Iterable[tuple[str, str]]) -> None:
    from rich.text import Text

    output = console(piped_width=10_000)
    for text, style in lines:
        output.print(Text(text, style), soft_wrap=True)


def marker(found: "Diff") -> Callable[[str, Row], Row]:
    """Return a function that adds the column `drifted` to a row: the state of its object, or ""."""
    states = {each.object: each.state for each in found.objects}
    return lambda section, row: {**row, "drifted": _state(section, row, states)}


def note_of_missing(found: "Diff") -> str:
    """The number of objects that have no row because they are missing, as a sentence; "" without any."""
    missing = sum(each.state == "missing" for each in found.objects)
    return f"note: {missing} missing in the kernel; `ebpfproxy dump --diff` shows them" if missing else ""


def _state(section: str, row: Row, states: Mapping[str, str]) -> str:
    if section in ("services", "endpoints"):
        names = (f"{row['service']}/{row['protocol']}/{family}" for family in _families(row))
        return next((states[each] for each in names if each in states), "")
    if section == "devices":
        sides = (f"device {row['device']}{side}" for side in ("", " ingress", " egress"))
        return next((states[each] for each in sides if each in states), "")
    if section == "networks":
        return states.get(row["network"], "")
    return ""


def _families(row: Row) -> tuple[str, ...]:
    """Of a NodePort in a dump of an earlier version, both."""
    if row.get("family"):
        return (row["family"],)
    if row["address"] == "*":
        return ("IPv4", "IPv6")
    return ("IPv6",) if ":" in row["address"] else ("IPv4",)
