"""`ebpfproxy bench`: what connections, packets, starts and changes cost, measured in a lab here."""

import json
import sys
from collections.abc import Iterable

import click
from rich.console import Console

from ebpfproxy.bench import churn, connect, flows, nodeport, overhead, packet, report, sync


@click.group("bench")
def command() -> None:
    """Measure connections, packets, starts and changes in a lab on this machine.

    Needs root and a C compiler, nodeport and overhead also iperf3. Everything is made in network
    namespaces and removed again; only the ratios carry over to another machine.
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


def _clients(_context: click.Context, _parameter: click.Parameter, text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(churn.CLIENTS):
        raise click.BadParameter(f"of {', '.join(churn.CLIENTS)}, with commas between them")
    return names


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


@command.command("nodeport")
@click.option("--services", callback=_numbers, default="10,10000", show_default=True, metavar="N[,N...]")
@click.option("--endpoints", type=click.IntRange(1), default=10, show_default=True, help="Of each Service.")
@click.option(
    "--samples", type=click.IntRange(1), default=10_000, show_default=True, help="Per path and metric."
)
@click.option(
    "--rounds", type=click.IntRange(1), default=5, show_default=True, help="Paths alternate in each."
)
@click.option(
    "--megabytes", type=click.IntRange(1), default=256, show_default=True, help="Of one stream of iperf3."
)
@click.option(
    "--redirect",
    type=click.Choice(["on", "off", "both"]),
    default="off",
    show_default=True,
    help="The agents' --ebpf-redirect.",
)
@click.option("--modes", default=_MODES, show_default=True, metavar="MODE[,MODE...]", help="--proxy-mode.")
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
@click.option("--services", callback=_numbers, default="10,10000", show_default=True, metavar="N[,N...]")
@click.option("--endpoints", type=click.IntRange(1), default=10, show_default=True, help="Of each Service.")
@click.option("--runs", type=click.IntRange(1), default=500_000, show_default=True, help="Of one sample.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Samples of each case.")
@_output
def packet_command(services: list[int], endpoints: int, runs: int, rounds: int, output: str) -> None:
    """Nanomegabytes that the programs take for a packet, by the kernel's test runs.

    floor_ns is a program that does nothing: it is in all other figures, too.
    """
    _show("packet", packet.run(services, endpoints, runs, rounds, _progress), output)


@command.command("overhead")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="States take turns.")
@click.option(
    "--megabytes", type=click.IntRange(1), default=256, show_default=True, help="Of one stream of iperf3."
)
@click.option(
    "--samples", type=click.IntRange(1), default=40_000, show_default=True, help="Exchanges in all rounds."
)
@click.option("--mode", default=_MODES, show_default=True, metavar="MODE", help="--proxy-mode.")
@_output
def overhead_command(rounds: int, megabytes: int, samples: int, mode: str, output: str) -> None:
    """What traffic from pod to pod, which is no Service's, pays for programs on its way.

    On one node and across two: with none (bare), as an agent attaches them by default (uplinks), and
    as with --socket-lb=host (pods).
    """
    _show("overhead", overhead.run(rounds, megabytes, samples, mode, _progress), output)


@command.command("flows")
@click.option("--held", type=click.IntRange(1), default=200_000, show_default=True, help="Connections.")
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
@click.option("--mode", default=_MODES, show_default=True, metavar="MODE", help="--proxy-mode.")
@_output
def flows_command(held: int, seconds: float, share: float, small: int, mode: str, output: str) -> None:
    """Many connections through NodePorts: held, opened at a rate, and more than the table has room for.

    Ends with status 1 if one failed, of those that were held, new, or busy while the table was full.
    """
    results = list(flows.run(held, seconds, share, small, mode, _progress))
    _show("flows", results, output)
    if any(result.metric in flows.FAILURES and result.p50 for result in results):
        raise click.exceptions.Exit(1)


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
@click.option(
    "--from",
    "clients",
    callback=_clients,
    default="pod,node",
    show_default=True,
    metavar="CLIENT[,CLIENT...]",
    help="pod, node, outside: the last one dials the NodePort.",
)
@click.option("--mode", default=_MODES, show_default=True, metavar="MODE", help="--proxy-mode.")
@_output
def churn_command(
    connects: int,
    seconds: float,
    flap_ms: float,
    crash_s: float,
    replace: bool,
    clients: list[str],
    mode: str,
    output: str,
) -> None:
    """Connections that fail while all endpoints of a Service but one come and go.

    Ends with status 1 if one did. connects_failed is of n connections, each with an exchange of a byte,
    established_failed of n that lasted all the time.
    """
    results = list(churn.run(connects, seconds, flap_ms, crash_s, replace, mode, _progress, clients))
    _show("churn", results, output)
    if any(result.metric in churn.FAILURES and result.p50 for result in results):
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
