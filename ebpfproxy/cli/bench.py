"""`ebpfproxy bench`: what a connection, a start and a change cost, measured in a lab on this machine."""

import json
import sys
from collections.abc import Iterable

import click
from rich.console import Console

from ebpfproxy.bench import connect, report, sync


@click.group("bench")
def command() -> None:
    """Measure latency, start and change in a lab on this machine.

    Needs root and a C compiler. Everything is made in network namespaces and removed again; only the
    ratios carry over to another machine.
    """


_output = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)
_MODES = "ebpf"


def _numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter("numbers, with commas between them") from None
    if min(numbers) < 1:
        raise click.BadParameter("each at least 1")
    return numbers


@command.command("connect")
@click.option("--services", callback=_numbers, default="1,1000,10000", show_default=True, metavar="N[,N...]")
@click.option("--endpoints", type=click.IntRange(1), default=10, show_default=True, help="Of each Service.")
@click.option(
    "--samples", type=click.IntRange(1), default=20_000, show_default=True, help="Per path and metric."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="Paths alternate in each."
)
@click.option("--modes", default=_MODES, show_default=True, metavar="MODE[,MODE...]", help="--proxy-mode.")
@_output
def connect_command(
    services: list[int], endpoints: int, samples: int, rounds: int, modes: str, output: str
) -> None:
    """Time of a new connection through a Service, beside straight to an endpoint.

    connect_us is connect() alone, crr_us up to the answer to a byte; targets are random over all
    Services. Paths: from a pod, and (-host) from the node. Mode none is this machine without a proxy.
    """
    sizes = [connect.Size(count, endpoints, samples, rounds) for count in services]
    _show("connect", connect.run(sizes, modes.split(","), _progress), output)


@command.command("sync")
@click.option("--services", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--endpoints", type=click.IntRange(1), default=10, show_default=True, help="Of each Service.")
@click.option("--changes", type=click.IntRange(1), default=50, show_default=True, help="In each round.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--mode", default=_MODES, show_default=True, metavar="MODE", help="--proxy-mode.")
@_output
def sync_command(services: int, endpoints: int, changes: int, rounds: int, mode: str, output: str) -> None:
    """Time from the agent's start, and from one endpoint's change, to the kernel; the agent's memory."""
    _show("sync", sync.run(services, endpoints, changes, rounds, mode, _progress), output)


def _progress(text: str) -> None:
    click.echo(text, err=True)


def _show(bench: str, results: Iterable[report.Result], output: str) -> None:
    found = list(results)
    if output == "json":
        click.echo(json.dumps(report.as_object(bench, found), indent=2))
    else:
        # Piped, as wide as it needs to be.
        Console(width=None if sys.stdout.isatty() else 120).print(report.as_table(bench, found))
