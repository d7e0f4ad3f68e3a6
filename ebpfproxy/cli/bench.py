"""`ebpfproxy bench`: what connections, packets, starts and changes cost, measured in a lab here."""

import json
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import click
from rich.console import Console

from ebpfproxy.bench import churn, connect, flows, nodeport, overhead, packet, report, sync
from ebpfproxy.bench.agent_runner import FaultSchedule
from ebpfproxy.bench.samples import Result
from ebpfproxy.cli import bench_options as options

_PIPED = 170
"""Characters in a line that no terminal wraps: a table's longest line."""


@click.group("bench")
def command() -> None:
    """Measure connections, packets, starts and changes in a lab on this machine.

    Needs root and a C compiler, nodeport and overhead also iperf3. Everything is made in network
    namespaces and removed again; only the ratios carry over to another machine.

    Each compares --modes in one table, beside no proxy where that makes sense. Smaller numbers of its
    other options make it shorter than it says here.
    """


def _bench(name: str, short: str, *, minutes: int) -> Callable[[Callable[..., Any]], click.Command]:
    """A command; `minutes` are those that its defaults take on two CPUs."""
    epilog = f"Takes about {minutes} min on two CPUs with one mode, and nearly as much again for each more."
    return command.command(name, short_help=f"{short} ({minutes} min).", epilog=epilog)


@_bench("connect", "A new connection through a Service", minutes=2)
@options.services("1,1000,10000")
@options.endpoints
@options.samples(20_000)
@options.rounds(20)
@options.compared
@options.output
def connect_command(
    services: list[int], endpoints: int, samples: int, rounds: int, modes: list[str], output: str
) -> None:
    """Time of a new connection through a Service, beside straight to an endpoint.

    connect_us is connect() alone, crr_us up to the answer to a byte; targets are random over all
    Services. Paths: from a pod, and (-host) from the node. Mode none is a machine without a proxy.
    """
    sizes = [connect.Size(count, endpoints, samples, rounds) for count in services]
    _show("connect", connect.run(sizes, modes, _progress), output)


@_bench("nodeport", "A client outside, through a NodePort", minutes=4)
@options.services("10,10000")
@options.endpoints
@options.samples(10_000)
@options.rounds(5)
@options.megabytes()
@options.compared
@options.output
def nodeport_command(
    services: list[int],
    endpoints: int,
    samples: int,
    rounds: int,
    megabytes: int,
    modes: list[str],
    output: str,
) -> None:
    """What a client outside pays for a NodePort, beside the same client routed straight to the pod.

    The pod is on the node that is dialed (-local), or on another one (-remote). direct paths cross the
    same nodes by links on which mode ebpf has no programs; direct-straight leaves out the first node.
    connect_us and crr_us are as of connect, rr_us is a byte there and back on an open connection.
    """
    sizes = [connect.Size(count, endpoints, samples, rounds) for count in services]
    _show("nodeport", nodeport.run(sizes, modes, megabytes, _progress), output)


@_bench("packet", "A packet on its way through a node", minutes=3)
@options.services("10,10000")
@options.endpoints
@options.samples(20_000)
@options.rounds(9)
@options.count("--runs", 500_000, "Test runs of each case, in each round.")
@options.compared
@options.output
def packet_command(
    services: list[int],
    endpoints: int,
    samples: int,
    rounds: int,
    runs: int,
    modes: list[str],
    output: str,
) -> None:
    """Nanoseconds that a packet takes on its way through a node, and within our programs alone.

    sent_ns is the time of a client's send() whose datagram goes through the node to a pod and is dropped
    there, all of it within the call: what it takes longer than in mode none is the mode's. sent_first_ns:
    a flow's first one. With mode ebpf also the kernel's test runs of its programs (BPF_PROG_TEST_RUN),
    which other modes cannot have; floor_ns is a program that does nothing, and in all of those.
    """
    sizes = [packet.Size(count, endpoints, samples, rounds, runs) for count in services]
    _show("packet", packet.run(sizes, modes, _progress), output)


@_bench("overhead", "Traffic that is no Service's", minutes=4)
@options.count("--services", 10_000, "Services that each mode has, and no client uses.")
@options.endpoints
@options.rounds(10)
@options.megabytes()
@options.count("--samples", 40_000, "Exchanges of each way, in all rounds.")
@options.compared
@options.output
def overhead_command(
    services: int,
    endpoints: int,
    rounds: int,
    megabytes: int,
    samples: int,
    modes: list[str],
    output: str,
) -> None:
    """What traffic from pod to pod, which is no Service's, pays for a proxy on its way.

    On one node and across two, beside mode none: throughput of a stream, small datagrams and requests a
    second. ebpf has no programs on the devices of pods, so on one node it has none at all; ebpf-host has.
    """
    size = overhead.Size(services, endpoints, rounds, megabytes, samples)
    _show("overhead", overhead.run(size, modes, _progress), output)


@_bench("flows", "Many connections, held and new", minutes=8)
@options.count("--held", 200_000, "Connections.")
@options.seconds("--seconds", 20.0, "Of new ones, by each path, in each round.", 1.0)
@options.rounds(3)
@click.option(
    "--small",
    type=click.IntRange(0),
    default=16384,
    show_default=True,
    help="Entries of a table that is too small, in mode ebpf; 0: leave it out.",
)
@options.compared
@options.output
def flows_command(held: int, seconds: float, rounds: int, small: int, modes: list[str], output: str) -> None:
    """Many connections through NodePorts: held, opened as fast as it goes, and too many for a table.

    made_per_s are those with a byte there and back, by NodePorts and straight to the pods, while others
    are held. Ends with status 1 if one failed, of those that were held, new, or busy while the table was
    full. Modes that have connections tracked need room for all of them (nf_conntrack_max), or fewer held.
    """
    size = flows.Size(held, seconds, rounds, small)
    results = list(flows.run(size, modes, _progress))
    _show("flows", results, output)
    _fail_where_any(results, flows.FAILURES)


@_bench("sync", "Starts, changes and memory of the agent", minutes=1)
@options.count("--services", 10_000, "In the cluster.")
@options.endpoints
@options.count("--changes", 50, "In each round.")
@options.rounds(3)
@options.compared
@options.output
def sync_command(
    services: int, endpoints: int, changes: int, rounds: int, modes: list[str], output: str
) -> None:
    """Time from the agent's start, and from one endpoint's change, to the kernel; the agent's memory.

    Changes come one by one, and agents do not wait for more of them (--iptables-min-sync-period=0s).
    """
    size = sync.Size(services, endpoints, changes, rounds)
    _show("sync", sync.run(size, modes, _progress), output)


@_bench("churn", "Whether any connection fails meanwhile", minutes=5)
@click.option(
    "--connects",
    type=click.IntRange(0),
    default=1_000_000,
    show_default=True,
    help="Of all clients together; 0: until the time is up.",
)
@options.seconds("--seconds", 300.0, "At the most; 0 for no limit.")
@options.seconds("--flap-ms", 10.0, "Between two changes.")
@options.seconds("--rate", 0.0, "New connections of each client in a second; 0: as many as go.")
@options.seconds("--crash-s", 0.0, "Kill the agent, and start it again, every so many seconds.")
@click.option("--replace", is_flag=True, help="And let it load other programs and maps each time.")
@options.seconds("--move-s", 0.0, "Move the agent to the next of --modes every so many seconds.")
@options.clients
@options.in_sequence
@options.output
def churn_command(
    connects: int,
    seconds: float,
    flap_ms: float,
    rate: float,
    crash_s: float,
    replace: bool,
    move_s: float,
    clients: list[str],
    modes: list[str],
    output: str,
) -> None:
    """Connections that fail while all endpoints of a Service but one come and go.

    connects_failed is of n connections, each with an exchange of a byte, established_failed of n that
    lasted all the time, download_failed of n downloads that ran all the time: each has to bring every byte
    and the server's own end. Ends with status 1 if one of all these failed.
    """
    size = churn.Size(connects, seconds, flap_ms, rate)
    results = list(churn.run(size, FaultSchedule(crash_s, replace, move_s), modes, _progress, clients))
    _show("churn", results, output)
    _fail_where_any(results, churn.FAILURES)


def _progress(text: str) -> None:
    click.echo(text, err=True)


def _fail_where_any(results: Iterable[Result], failures: Collection[str]) -> None:
    """End with status 1 where one of the metrics `failures` is not 0."""
    if any(result.metric in failures and result.p50 for result in results):
        raise click.exceptions.Exit(1)


def _show(bench: str, results: Iterable[Result], output: str) -> None:
    found = list(results)
    if output == "json":
        click.echo(json.dumps(report.as_object(bench, found), indent=2))
    else:
        # Piped, as wide as it needs to be.
        Console(width=None if sys.stdout.isatty() else _PIPED).print(report.as_table(bench, found))
