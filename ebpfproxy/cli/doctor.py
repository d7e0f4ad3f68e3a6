"""``ebpfproxy doctor``"""

import sys
from collections.abc import Iterable

import click

from ebpfproxy.config import Config, FlagsCommand, config_options

_INCOMPLETE = 1
_WIDE = 10_000  # columns, where there is no terminal: a row stays one line
_ANY_MODE = "any"


@click.command("doctor", cls=FlagsCommand)
@config_options
def command(config: Config) -> int:
    """Show which modes work on this machine, what the others need, and which one auto would select.

    Probes every requirement, and compiles and loads the BPF programs. Changes nothing. Run it with the
    agent's flags and in the agent's place. The exit code is 0 if the selected mode has every feature that
    it can use, 1 otherwise.

    On a node with several uplinks, it also names those that clients cannot use in any mode. That does not
    change the exit code.
    """
    from ebpfproxy.backends import uplink_checks
    from ebpfproxy.backends.selection import AUTO, MODES, best, examine

    _show_progress("trying what each mode needs, and loading the BPF programs: about 5 s")
    findings = {mode.name: examine(mode, config) for mode in MODES}
    chosen = config.proxy_mode if config.proxy_mode != AUTO else best(findings)
    _show(
        (name, each.feature, _state(each.present, each.needed), str(each.missing), each.remedy)
        for name, found in (*findings.items(), (_ANY_MODE, uplink_checks.probe()))
        for each in found
    )
    why = "as --proxy-mode says" if config.proxy_mode != AUTO else "the first that has all it needs"
    click.echo(f"mode: {chosen} ({why})" if chosen else "mode: none works here")
    complete = chosen is not None and all(each.present for each in findings[chosen])
    return 0 if complete else _INCOMPLETE


def _show_progress(what: str) -> None:
    """To a person who waits, and to no file."""
    if sys.stderr.isatty():
        click.echo(f"{what} ...", err=True)


def _state(present: bool, needed: bool) -> str:
    return "yes" if present else "NO" if needed else "no"


def _show(rows: Iterable[tuple[str, str, str, str, str]]) -> None:
    """A table; what is missing stands in a line below its feature, so that nothing is cut off."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("MODE", "FEATURE", "THERE", "WHAT IS MISSING, AND WHAT TO DO"):
        table.add_column(heading, overflow="fold")
    last = ""
    for mode, feature, state, missing, remedy in rows:
        reported = missing + (f"; {remedy}" if remedy else "")
        table.add_row(mode if mode != last else "", feature, state, reported)
        last = mode
    if sys.stdout.isatty():
        Console(file=sys.stdout, highlight=False).print(table)
        return
    console = Console(highlight=False, width=_WIDE)
    with console.capture() as written:
        console.print(table)
    for line in written.get().splitlines():
        click.echo(line.rstrip())
