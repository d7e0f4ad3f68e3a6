"""``ebpfproxy doctor``: what this node lacks, which other programs it has, and what to do."""

import functools
import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.terminal import progress
from ebpfproxy.config import Config, FlagsCommand, config_options

if TYPE_CHECKING:
    from ebpfproxy.diagnose.doctor.remedies import Outcome
    from ebpfproxy.diagnose.doctor.report import Report

_INCOMPLETE = 1


@click.command(
    "doctor",
    cls=FlagsCommand,
    epilog=examples("""
    # Find the mode that auto selects, and what the others need: in the agent's pod, or on the node.
    ebpfproxy doctor
    # Check one mode with the agent's flags.
    ebpfproxy doctor --proxy-mode=iptables --iptables-backend=nft
    # For scripts.
    ebpfproxy doctor -o json
    # Show what --fix would do.
    ebpfproxy doctor --fix --dry-run
    """),
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Output format.",
)
@click.option(
    "--fix",
    is_flag=True,
    help="Do what the agent does at its start in the selected mode: mount a bpffs, set sysctls; also load "
    "kernel modules. Print each action before. Objects of other programs are not changed.",
)
@click.option("--dry-run", is_flag=True, help="With --fix: print the actions, and change nothing.")
@click.option(
    "--cni-config-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the node's CNI configuration. Default: /etc/cni/net.d of the node, found by "
    "/host, by --proc-root, or by this path.",
)
@config_options
def command(config: Config, output: str, fix: bool, dry_run: bool, cni_config_dir: Path | None) -> int:
    """Show what this node lacks for each mode, which mode auto would select, and what other programs of the
    node require.

    Probes every requirement, compiles and loads the BPF programs, and searches for network plugins
    (flannel, Calico, Cilium, Amazon VPC CNI, kindnet, kube-router), kube-proxy and its replacements. Each
    problem has a remedy and the page of the documentation. Changes nothing without --fix. Run it with the
    agent's flags, and in the agent's namespaces or pod.

    STATE is `present`, `missing (required)` or `missing (optional)`; the lines below a row explain it. The
    exit code is 0 if the selected mode has every feature that it can use and nothing is `missing (required)`
    for the node, 1 otherwise.
    """
    from ebpfproxy.diagnose.doctor import report as reports

    if dry_run and not fix:
        raise click.UsageError("--dry-run requires --fix")
    outcomes: Sequence[Outcome] = ()
    if fix:
        announce = functools.partial(_announce, is_dry=dry_run, to_errors=output == "json")
        report, outcomes = reports.fix(config, cni_config_dir, announce, dry_run)
    else:
        with progress("probing the requirements of each mode and loading the BPF programs: about 5 s"):
            report = reports.make_report(config, cni_config_dir)
    if output == "json":
        click.echo(json.dumps(_as_object(report, outcomes), indent=2))
    else:
        if fix:
            _show_outcomes(outcomes)
        _show(report)
    return 0 if report.is_complete else _INCOMPLETE


def _announce(action: str, is_dry: bool, to_errors: bool) -> None:
    click.echo(f"{'would run' if is_dry else 'fix'}: {action}", err=to_errors)


def _show_outcomes(outcomes: Sequence["Outcome"]) -> None:
    """Print what failed; without any action, that there was nothing to do."""
    if not outcomes:
        click.echo("fix: nothing to do")
    for action, _, failure in outcomes:
        if failure:
            click.echo(f"failed: {action}: {failure.message}" + (f"; {failure.hint}" if failure.hint else ""))
    click.echo()


def _as_object(report: "Report", outcomes: Sequence["Outcome"]) -> dict[str, object]:
    return {
        "mode": report.selected,
        "complete": report.is_complete,
        "checks": [
            {
                "subject": each.subject,
                "feature": each.feature,
                "state": str(each.state),
                "detail": each.detail,
                "remedy": each.remedy,
                "link": each.link,
            }
            for each in report.checks
        ],
        "actions": [
            {
                "action": each.action,
                "state": each.state,
                "failure": each.failure.message if each.failure else "",
            }
            for each in outcomes
        ],
    }


def _show(report: "Report") -> None:
    """Print the rows, each with its explanation in the lines below it, for the width of the terminal."""
    from ebpfproxy.diagnose.doctor.check import State

    width = shutil.get_terminal_size().columns  # 80 if the output is no terminal, and COLUMNS is not set
    subjects = max(len(each.subject) for each in report.checks)
    states = max(map(len, State))
    below = " " * (subjects + 6)
    click.echo(f"{'SUBJECT':{subjects}}  {'STATE':{states}}  FEATURE")
    previous = ""
    for each in report.checks:
        subject = each.subject if each.subject != previous else ""
        _wrap(f"{subject:{subjects}}  {each.state:{states}}  ", each.feature, width)
        _wrap(below, each.detail, width)
        if each.remedy:
            _wrap(below, f"remedy: {each.remedy}", width)
            _wrap(below, f"see: {each.link}", width)
        previous = each.subject
    selected = report.selected
    click.echo(
        f"mode: {selected} ({report.reason})" if selected else "mode: none, no mode works on this node"
    )


def _wrap(before: str, text: str, width: int) -> None:
    """Print `text` after `before`, in lines that begin at the same column. A longer word is not broken."""
    following = " " * len(before)
    for line in textwrap.wrap(
        text, width, initial_indent=before, subsequent_indent=following, break_long_words=False,
        break_on_hyphens=False,
    ):  # fmt: skip
        click.echo(line)
