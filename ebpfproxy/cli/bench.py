"""`ebpfproxy bench`: what connections, packets, starts and changes cost, measured in a lab here."""

import json
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import click
from rich.console import Console

from ebpfproxy.bench import churn, connect, flows, nodeport, overhead, packet, report, sync

_MODES = "ebpf"

_F = TypeVar("_F", bound=Callable[..., Any])


@click.group("bench")
def command() -> None:
    """Measure connections, packets, starts and changes in a lab on this machine.

    Needs root and a C compiler, nodeport and overhead also iperf3. Everything is made in network
    namespaces and removed again; only the ratios carry over to another machine.
    """


def _numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise click.BadParameter("numbers, with commas between them") from None
    if min(numbers) < 1:
        raise click.BadParameter("each at least 1")
    return numbers


def _clients(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(churn.CLIENTS):
        raise click.BadParameter(f"of {', '.join(churn.CLIENTS)}, with commas between them")
    return names


def _count(name: str, default: int, text: str | None = None) -> Callable[[_F], _F]:
    """An option that is a number, at least 1."""
    return click.option(name, type=click.IntRange(1), default=default, show_default=True, help=text)


def _services(default: str) -> Callable[[_F], _F]:
    return click.option(
        "--services", callback=_numbers, default=default, show_default=True, metavar="N[,N...]"
    )


def _samples(default: int) -> Callable[[_F], _F]:
    return _count("--samples", default, "Per path and metric.")


_endpoints = _count("--endpoints", 10, "Of each Service.")
_rounds_of_paths = _count("--rounds", 5, "Paths alternate in each.")
_megabytes = _count("--megabytes", 256, "Of one stream of iperf3.")
_modes = click.option(
    "--modes", default=_MODES, show_default=True, metavar="MODE[,MODE...]", help="--proxy-mode."
)
_mode = click.option("--mode", default=_MODES, show_default=True, metavar="MODE", help="--proxy-mode.")
_output = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True
)


@command.command("connect")
@_services("1,1000,10000")
@_endpoints
@_samples(20_000)
@_rounds_of_paths
@_modes
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


@command.command("nodeport")
@_services("10,10000")
@_endpoints
@_samples(10_000)
@_rounds_of_paths
@_megabytes
@click.option(
    "--redirect",
    type=click.Choice(["on", "off", "both"]),
    default="off",
    show_default=True,
    help="The agents' --ebpf-redirect.",
)
@_modes
@_output
def nodeport_command(
    services: list[int],
    endpoints: int,
    samples: int,
    rounds: int,
    megabytes: int,
    redirect: str,
    modes: str,
    output: str,
) -> None:
    """What a client outside pays for a NodePort, beside the same client routed straight to the pod.

    The pod is on the node that is dialed (-local), or on another one (-remote). direct paths cross the
    same nodes by links on which no agent has programs; direct-straight leaves out the first node.
    """
    sizes = [connect.Size(count, endpoints, samples, rounds) for count in services]
    redirects = {"on": [True], "off": [False], "both": [False, True]}[redirect]
    _show("nodeport", nodeport.run(sizes, modes.split(","), redirects, megabytes, _progress), output)


@command.command("packet")
@_services("10,10000")
@_endpoints
@_count("--runs", 500_000, "Of one sample.")
@_count("--rounds", 9, "Samples of each case.")
@_output
def packet_command(services: list[int], endpoints: int, runs: int, rounds: int, output: str) -> None:
    """Nanoseconds that the programs take for a packet, by the kernel's test runs.

    floor_ns is a program that does nothing: it is in all other figures, too.
    """
    _show("packet", packet.run(services, endpoints, runs, rounds, _progress), output)


@command.command("overhead")
@_count("--rounds", 10, "States take turns.")
@_megabytes
@_count("--samples", 40_000, "Exchanges in all rounds.")
@_mode
@_output
def overhead_command(rounds: int, megabytes: int, samples: int, mode: str, output: str) -> None:
    """What traffic from pod to pod, which is no Service's, pays for programs on its way.

    On one node and across two: with none (bare), as an agent attaches them by default (uplinks), and
    as with --socket-lb=host (pods).
    """
    _show("overhead", overhead.run(rounds, megabytes, samples, mode, _progress), output)


@command.command("flows")
@_count("--held", 200_000, "Connections.")
@click.option("--seconds", type=click.FloatRange(1.0), default=60.0, show_default=True, help="Of new ones.")
@click.option(
    "--share", type=float, default=0.9, show_default=True, help="Of the rate that the direct path sustains."
)
@click.option(
    "--small",
    type=click.IntRange(0),
    default=16384,
    show_default=True,
    help="Entries of the full table; 0: leave it out.",
)
@_mode
@_output
def flows_command(held: int, seconds: float, share: float, small: int, mode: str, output: str) -> None:
    """Many connections through NodePorts: held, opened at a rate, and more than the table has room for.

    Ends with status 1 if one failed, of those that were held, new, or busy while the table was full.
    """
    results = list(flows.run(held, seconds, share, small, mode, _progress))
    _show("flows", results, output)
    _fail_where_any(results, flows.FAILURES)


@command.command("sync")
@_count("--services", 10_000)
@_endpoints
@_count("--changes", 50, "In each round.")
@_count("--rounds", 3)
@_mode
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
@click.option(
    "--move-s", type=float, default=0.0, help="Move the agent to the next of --modes every so many seconds."
)
@click.option(
    "--from",
    "clients",
    callback=_clients,
    default="pod,node",
    show_default=True,
    metavar="CLIENT[,CLIENT...]",
    help="pod, node, outside: the last one dials the NodePort.",
)
@_modes
@_output
def churn_command(
    connects: int,
    seconds: float,
    flap_ms: float,
    crash_s: float,
    replace: bool,
    move_s: float,
    clients: list[str],
    modes: str,
    output: str,
) -> None:
    """Connections that fail while all endpoints of a Service but one come and go.

    Ends with status 1 if one did. connects_failed is of n connections, each with an exchange of a byte,
    established_failed of n that lasted all the time.
    """
    fate = churn.Fate(crash_s, replace, move_s)
    results = list(churn.run(connects, seconds, flap_ms, fate, modes.split(","), _progress, clients))
    _show("churn", results, output)
    _fail_where_any(results, churn.FAILURES)


def _progress(text: str) -> None:
    click.echo(text, err=True)


def _fail_where_any(results: Iterable[report.Result], failures: Collection[str]) -> None:
    """End with status 1 where one of the metrics `failures` is not 0."""
    if any(result.metric in failures and result.p50 for result in results):
        raise click.exceptions.Exit(1)


def _show(bench: str, results: Iterable[report.Result], output: str) -> None:
    found = list(results)
    if output == "json":
        click.echo(json.dumps(report.as_object(bench, found), indent=2))
    else:
        # Piped, as wide as it needs to be.
        Console(width=None if sys.stdout.isatty() else 120).print(report.as_table(bench, found))
