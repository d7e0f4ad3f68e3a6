"""`ebpfproxy bench`: measures connections, packets, starts and changes in a testbed on this machine."""

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

import click

from ebpfproxy.bench import (
    churn,
    connect,
    nodeport,
    packet,
    report,
    sync,
)
from ebpfproxy.bench.agent_runner import FaultSchedule
from ebpfproxy.bench.samples import Result
from ebpfproxy.bench.sides import Progress
from ebpfproxy.cli import bench_compare
from ebpfproxy.cli import bench_options as options
from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.terminal import console, steps

_PIPED = 170
"""Characters in the longest line of a table, for output that no terminal wraps."""


@click.group(
    "bench",
    epilog=examples("""
    # Compare two modes.
    ebpfproxy bench connect --modes=ebpf,nftables
    """),
)
def command() -> None:
    """Measure connections, packets, starts and changes on this machine.

    Needs root and a C compiler. Each benchmark creates nodes
    and pods in network namespaces and removes them afterwards.

    The result is one table that compares the --modes. The row "none" is the same node without a proxy.
    Compare ratios, not times: times depend on the machine.

    The minutes are for the default options, one mode and two CPUs. Smaller numbers make a run shorter.
    """


command.add_command(bench_compare.command)


def _bench(
    name: str, short: str, *, minutes: int, example: str
) -> Callable[[Callable[..., Any]], click.Command]:
    """A command. `minutes`: what its defaults take on two CPUs, with one mode."""
    epilog = f"Takes about {minutes} min with one mode on two CPUs, and about as long for each further mode."
    return command.command(
        name, short_help=f"{short} ({minutes} min).", epilog=f"{epilog}\n\n{examples(example)}"
    )


@_bench(
    "connect",
    "Time of a new connection through a Service",
    minutes=2,
    example="""
    # Compare modes with few and many Services.
    ebpfproxy bench connect --services=1,10000 --modes=ebpf,nftables
    """,
)
@options.services("1,1000,10000")
@options.endpoints
@options.samples(20_000)
@options.rounds(20)
@options.compared
@options.output
def connect_command(
    services: list[int], endpoints: int, samples: int, rounds: int, modes: list[str], output: str
) -> None:
    """Measure a new connection to a Service, compared with one to the endpoint's own address.

    \b
    connect_us  time of connect() alone
    crr_us      time until the answer to one byte arrives

    Each connection selects a Service at random. Paths without a suffix start in a pod, paths with -host
    on the node.
    """
    sizes = [connect.Size(count, endpoints, samples, rounds) for count in services]
    _show("connect", _results(lambda progress: connect.run(sizes, modes, progress)), output)


@_bench(
    "nodeport",
    "Time and throughput of an outside client through a NodePort",
    minutes=4,
    example="""
    # Measure mode ebpf with packets that skip the stack of the node.
    ebpfproxy bench nodeport --modes=ebpf,ebpf-redirect
    """,
)
@options.services("10,10000")
@options.endpoints
@options.samples(10_000)
@options.rounds(5)
@options.megabytes()
@click.option(
    "--held",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Connections that stay open during the run, in each mode.",
)
@options.compared
@options.output
def nodeport_command(
    services: list[int],
    endpoints: int,
    samples: int,
    rounds: int,
    megabytes: int,
    held: int,
    modes: list[str],
    output: str,
) -> None:
    """Measure an outside client that uses a NodePort, compared with one that is routed to the pod.

    \b
    connect_us  time of connect() alone
    crr_us      time until the answer to one byte arrives, with a new connection
    rr_us       the same on an open connection
    tcp_mbit_s  throughput of one TCP stream from the client
    download_mbit_s  the same to the client
    sent_ns     time of a client's send(), in which the datagram reaches the other pod

    \b
    -local           the pod is on the node that the client connects to
    -remote          the pod is on another node
    direct           the same nodes, by links without programs of mode ebpf
    direct-straight  directly to the second node
    pods-one-node, pods-two-nodes
                     from pod to pod, without a Service

    With --held, the exit code is 1 if a held connection could not be opened, or did not answer at the end.
    """
    sizes = [nodeport.Size(count, endpoints, samples, rounds, megabytes, held) for count in services]
    results = _results(lambda progress: nodeport.run(sizes, modes, progress))
    _show("nodeport", results, output)
    _fail_where_any(results, nodeport.FAILURES)


@_bench(
    "packet",
    "Time that a packet takes through a node",
    minutes=3,
    example="""
    # Measure the BPF programs, with a result for other programs.
    ebpfproxy bench packet --services=10 -o json
    """,
)
@options.services("10,10000")
@options.endpoints
@options.samples(20_000)
@options.rounds(9)
@options.count("--runs", 500_000, "Test runs of each BPF program and case, in each round.")
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
    """Measure how long a packet takes through a node, and in the BPF programs alone.

    \b
    sent_ns        time of a client's send(), in which the datagram passes the node and is
                   dropped in the pod; compare it with mode none
    sent_first_ns  the same for the first datagram of a flow
    floor_ns       mode ebpf only: a test run of a program that does nothing

    For mode ebpf the table also has test runs of each program (BPF_PROG_TEST_RUN). They include floor_ns.
    """
    sizes = [packet.Size(count, endpoints, samples, rounds, runs) for count in services]
    _show("packet", _results(lambda progress: packet.run(sizes, modes, progress)), output)


@_bench(
    "sync",
    "Start time, change time and memory of the agent",
    minutes=3,
    example="""
    # Measure an agent that watches an API server.
    ebpfproxy bench sync --services=1000 --source=api
    """,
)
@options.count("--services", 10_000, "Services in the cluster.")
@options.endpoints
@options.count("--changes", 50, "Endpoint changes in each round, spread over three sync periods.")
@options.seconds("--sync-period", 10.0, "The agent's --sync-period, in seconds.", 1.0)
@click.option(
    "--affinity",
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    help="Services with session affinity, in percent.",
)
@options.rounds(3)
@options.objects
@options.compared
@options.output
def sync_command(
    services: int,
    endpoints: int,
    changes: int,
    sync_period: float,
    affinity: int,
    rounds: int,
    source: str,
    modes: list[str],
    output: str,
) -> None:
    """Measure the time until the kernel is programmed, and the agent's memory over three sync periods.

    \b
    healthz_s             from the agent's start until /healthz answers
    first_sync_s          from the agent's start to its first sync
    first_answer_s        from the agent's start to the first answer of the last Service
    restart_sync_s        as first_sync_s, after a restart: the kernel is already programmed
    change_ms             from the change of one endpoint to the first answer that shows it
    agent_latency_ms      from the agent's receipt of a change to the kernel, by its log
    agent_duration_ms     of that, the sync alone
    stall_ms              the longest time for which the control thread read no events; 0 if
                          it was below 5 ms
    idle_cores            CPU of the agent without changes, during one sync period
    rss_first_mb          memory of the agent after the first sync, without the tools that it starts
    rss_mb, peak_rss_mb   the same after the changes and three sync periods; the peak

    Changes come one by one, and the agent applies each at once (--iptables-min-sync-period=0s). In each
    sync period the agent compares the kernel with what it wrote. The compiled programs of mode ebpf exist,
    as in the image.
    """
    size = sync.Size(services, endpoints, changes, rounds, sync_period, affinity, source)
    _show("sync", _results(lambda progress: sync.run(size, modes, progress)), output)


@_bench(
    "churn",
    "Failed connections while endpoints, agents or modes change",
    minutes=5,
    example="""
    # Kill and restart the agent every 15 s.
    ebpfproxy bench churn --connects=100000 --crash-s=15
    """,
)
@click.option(
    "--connects",
    type=click.IntRange(0),
    default=1_000_000,
    show_default=True,
    help="New connections of all clients together. 0: as many as fit into --seconds.",
)
@options.seconds("--seconds", 300.0, "Longest time of a run, in seconds. 0: no limit.")
@options.seconds("--flap-ms", 10.0, "Milliseconds between two changes of endpoints of the clients' Service.")
@options.count("--services", 1, "Services in the cluster. Clients use one of them.")
@options.count("--endpoints", 10, "Endpoints of each of the others.")
@options.seconds("--changes", 0.0, "Endpoint changes of the others per second. Up to 100 take turns.")
@options.seconds("--rate", 0.0, "New connections per second and client. 0: as many as possible.")
@options.seconds("--crash-s", 0.0, "Kill and restart the agent every so many seconds. 0: never.")
@click.option("--replace", is_flag=True, help="With --crash-s: load new programs and maps at each restart.")
@options.seconds(
    "--switch-s", 0.0, "Switch the agent to the next of --modes every so many seconds. 0: never."
)
@click.option("--move-s", type=click.FloatRange(0.0), default=0.0, hidden=True)  # previous name, until 0.3
@options.clients
@options.objects
@options.in_sequence
@options.output
def churn_command(
    connects: int,
    seconds: float,
    flap_ms: float,
    services: int,
    endpoints: int,
    changes: float,
    rate: float,
    crash_s: float,
    replace: bool,
    switch_s: float,
    move_s: float,
    clients: list[str],
    source: str,
    modes: list[str],
    output: str,
) -> None:
    """Count failed connections while the endpoints of a Service change, all except one.

    \b
    connects_failed     new connections, each with one byte and its answer
    established_failed  connections that are open during the complete run
    download_failed     downloads during the complete run: each must deliver every
                        byte, and end as the server ends it
    leaked_...          entries of the maps of Services that remain after the run
    lag_ms              with --changes: from the agent's receipt of a change to the
                        kernel, by its log
    agent_cores         CPU of the agent; _without_manifests: without the thread that
                        reads the folder of manifests
    rss_begin_mb, rss_middle_mb, rss_end_mb
                        memory of the agent; also its descriptors and threads

    The last three groups need an agent that is not killed. The column n has the number of connections. The
    exit code is 1 if any connection failed or an entry leaked.
    """
    size = churn.Size(connects, seconds, flap_ms, rate, services, endpoints, changes, source)
    faults = FaultSchedule(crash_s, replace, switch_s or move_s)
    results = _results(lambda progress: churn.run(size, faults, modes, progress, clients))
    _show("churn", results, output)
    _fail_where_any(results, (*churn.FAILURES, *churn.LEAKS))


def _results(run: Callable[[Progress], Iterable[Result]]) -> list[Result]:
    with steps() as progress:
        return list(run(progress))


def _fail_where_any(results: Iterable[Result], failures: Collection[str]) -> None:
    """Exit with code 1 if one of the metrics `failures` is not 0."""
    if any(result.metric in failures and result.p50 for result in results):
        raise click.exceptions.Exit(1)


def _show(bench: str, results: list[Result], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(report.as_object(bench, results), indent=2))
    else:
        console(piped_width=_PIPED).print(report.as_table(bench, results))
