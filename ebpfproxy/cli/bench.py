"""`ebpfproxy bench`: what a connection, a start and a change cost, measured in a lab on this machine."""

import json
import sys
from collections.abc import Iterable

import click
from rich.console import Console

from ebpfproxy.bench import churn, connect, report, sync


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


@command.command("churn")
@click.option(
    "--connects",
    type=click.IntRange(0),
    default=1_000_000,
    show_default=True,
    help="0: until the time is up.",
)
@click.option("--seconds", type=float, default=300.0, show_default=True, help="At the most; 0 for no limit.")
@click.option("--flap-ms", type=float, default=10.0, show_default=True, help="Between two changes.")
@click.option(
    "--crash-s", type=float, default=0.0, help="Kill the agent, and start it again, every so many seconds."
)
@click.option("--replace", is_flag=True, help="And let it load other programs and maps each time.")
@click.option("--mode", default=_MODES, show_default=True, metavar="MODE", help="--proxy-mode.")
@_output
def churn_command(
    connects: int, seconds: float, flap_ms: float, crash_s: float, replace: bool, mode: str, output: str
) -> None:
    """Connections that fail while all endpoints of a Service but one come and go.

    Ends with status 1 if one did. connects_failed is of n connections, each with an exchange of a byte.
    """
    results = list(churn.run(connects, seconds, flap_ms, crash_s, replace, mode, _progress))
    _show("churn", results, output)
    if any(result.metric == "connects_failed" and result.p50 for result in results):
        raise click.exceptions.Exit(1)


def _progress(text: str) -> None:
    click.echo(text, err=True)


def _show(bench: str, results: Iterable[report.Result], output: str) -> None:
    found = list(results)
    if output == "json":
        click.echo(json.dumps(report.as_object(bench, found), indent=2))
    else:
        # Piped, as wide as it needs to be.
        Console(width=None if sys.stdout.isatty() else 120).print(report.as_table(bench, found))
