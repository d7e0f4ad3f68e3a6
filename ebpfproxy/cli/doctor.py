"""``ebpfproxy doctor``: which modes work on this machine, and what the others need."""

from collections.abc import Iterable

import click

from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.terminal import console, progress
from ebpfproxy.config import Config, FlagsCommand, config_options

_INCOMPLETE = 1
_UNLIMITED_WIDTH = 10_000  # columns if the output is not a terminal, so that a row stays one line
_ANY_MODE = "any"


@click.command(
    "doctor",
    cls=FlagsCommand,
    epilog=examples("""
    # Find the mode that auto selects, and what the others need.
    ebpfproxy doctor
    # Check one mode with the agent's flags.
    ebpfproxy doctor --proxy-mode=iptables --iptables-backend=nft
    """),
)
@config_options
def command(config: Config) -> int:
    """Show which modes work on this machine, what the others need, and which one auto would select.

    Probes every requirement, and compiles and loads the BPF programs. Changes nothing. Run it with the
    agent's flags, and in the agent's namespaces or pod. The exit code is 0 if the selected mode has every
    feature that it can use, 1 otherwise.

    On a node with several uplinks, it also names uplinks that clients cannot use in any mode. They do not
    change the exit code.
    """
    from ebpfproxy.backends import uplink_checks
    from ebpfproxy.backends.selection import AUTO, MODES, best, examine

    with progress("probing the requirements of each mode and loading the BPF programs: about 5 s"):
        findings = {mode.name: examine(mode, config) for mode in MODES}
    selected = config.proxy_mode if config.proxy_mode != AUTO else best(findings)
    _show(
        (name, each.feature, _state(each.present, each.needed), str(each.missing), each.remedy)
        for name, mode_findings in (*findings.items(), (_ANY_MODE, uplink_checks.probe()))
        for each in mode_findings
    )
    reason = "selected by --proxy-mode" if config.proxy_mode != AUTO else "the first that works on this node"
    click.echo(f"mode: {selected} ({reason})" if selected else "mode: none, no mode works on this node")
    complete = selected is not None and all(each.present for each in findings[selected])
    return 0 if complete else _INCOMPLETE


def _state(present: bool, needed: bool) -> str:
    return "yes" if present else "NO" if needed else "no"


def _show(rows: Iterable[tuple[str, str, str, str, str]]) -> None:
    """Print a table. Long cells wrap on a terminal, so that nothing is cut off."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("MODE", "FEATURE", "PRESENT", "MISSING; REMEDY"):
        table.add_column(heading, overflow="fold")
    previous = ""
    for mode, feature, state, missing, remedy in rows:
        explanation = missing + (f"; {remedy}" if remedy else "")
        table.add_row(mode if mode != previous else "", feature, state, explanation)
        previous = mode
    output = console(piped_width=_UNLIMITED_WIDTH)
    if output.is_terminal:
        output.print(table)
        return
    with output.capture() as captured:
        output.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())
