"""`ebpfproxy bench compare`: all cases in all modes, and kube-proxy, as a report."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from ebpfproxy.bench import compare, compare_cases, html_report, proxies
from ebpfproxy.bench.load import one_cpu
from ebpfproxy.bench.results import Comparison, Method, from_json
from ebpfproxy.cli import bench_options as options
from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.terminal import console, steps

_DEFAULTS: dict[str, Any] = {
    "services": (1, 100, 1000, 10000),
    "rounds": 10,
    "seconds": 0.1,
    "starts": 2,
    "changes": 10,
}
_QUICK: dict[str, Any] = {"services": (1, 1000), "rounds": 5, "seconds": 0.05, "starts": 1, "changes": 5}

_SUFFIXES = (".json", ".csv", ".html")
_PIPED = 170


def _files(_context: click.Context, _parameter: click.Parameter, paths: tuple[Path, ...]) -> tuple[Path, ...]:
    for path in paths:
        if path.suffix not in _SUFFIXES:
            raise click.BadParameter(f"{path} does not end with one of {', '.join(_SUFFIXES)}")
        if not path.absolute().parent.is_dir():
            raise click.BadParameter(f"the folder of {path} does not exist")
    return paths


def _preset(name: str) -> str:
    default, quick = (
        ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for value in (_DEFAULTS[name], _QUICK[name])
    )
    return f"[default: {default}; with --quick {quick}]"


@click.command(
    "compare",
    short_help="All cases in all modes, and kube-proxy, as a report.",
    epilog=examples("""
    # Look at the result in a browser.
    ebpfproxy bench compare --quick -o report.html
    # Compare with kube-proxy.
    ebpfproxy bench compare --kube-proxy=/usr/local/bin/kube-proxy -o report.html -o report.json
    # Measure some cases in some modes.
    ebpfproxy bench compare --cases=connect,dns --services=1000 --modes=ebpf,nftables
    # Convert an earlier result.
    ebpfproxy bench compare --from=report.json -o report.csv
    """),
)
@click.option(
    "--services",
    callback=lambda context, parameter, text: text and options.numbers(context, parameter, text),
    metavar="N[,N...]",
    help=f"Numbers of Services, each a run. {_preset('services')}",
)
@click.option(
    "--modes",
    callback=lambda _context, _parameter, text: text and options.different_words(proxies.NAMES, text),
    metavar="MODE[,MODE...]",
    help=f"Modes, separated by commas: {', '.join(proxies.NAMES)}. Mode none is always measured. "
    "[default: all that this machine supports]",
)
@click.option(
    "--cases",
    callback=lambda _context, _parameter, text: options.different_words(compare_cases.NAMES, text),
    default=",".join(compare_cases.NAMES),
    metavar="CASE[,CASE...]",
    help=f"Cases, separated by commas: {', '.join(compare_cases.NAMES)}. [default: all]",
)
@click.option(
    "--kube-proxy",
    "kube_proxy",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path),
    help="The binary of a kube-proxy to compare with, in all modes that this kernel supports.",
)
@options.count("--endpoints", 3, "Endpoints of each Service.")
@click.option(
    "--rounds", type=click.IntRange(1), help=f"Rounds. Modes take turns in each. {_preset('rounds')}"
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01),
    help=f"Seconds of each case and mode in a round. {_preset('seconds')}",
)
@click.option(
    "--starts", type=click.IntRange(1), help=f"Starts of each proxy, on new nodes. {_preset('starts')}"
)
@click.option(
    "--changes", type=click.IntRange(1), help=f"Changes of an endpoint after each start. {_preset('changes')}"
)
@options.seconds(
    "--limit",
    30.0,
    "Seconds that a start may take; slower modes are left out. Also for changes: none begins later.",
    1.0,
)
@click.option("--quick", is_flag=True, help="A short run: see the defaults above.")
@click.option(
    "--from",
    "earlier",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure nothing, but convert the JSON file of an earlier run.",
)
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_files,
    metavar="FILE",
    help="Write a .json, .csv or .html file. May be given several times.",
)
def command(
    modes: list[str] | None,
    cases: list[str],
    kube_proxy: Path | None,
    endpoints: int,
    limit: float,
    quick: bool,
    earlier: Path | None,
    outputs: tuple[Path, ...],
    **sizes: Any,
) -> None:
    """Compare all modes with each other, with kube-proxy and with no proxy.

    \b
    connect     time of connect() from a pod to a ClusterIP
    request     one byte and its answer on an open connection
    udp         the same on a connected UDP socket
    dns         the same with a new UDP socket for each request
    throughput  one TCP stream to a ClusterIP
    nodeport    new connection with one byte and its answer, from outside to a NodePort
    packet      one datagram from outside through a NodePort
    startup     from the start of the proxy to the first answer of the last Service
    change      from the change of an endpoint to the first connection that shows it
    memory      memory of the proxy after that

    Modes take turns within each round, so that a change of the machine's speed affects all, and clients
    and servers share a CPU. Prints the ratios: of traffic to no proxy, of the others to the first mode.

    With the defaults, it takes about six minutes on two CPUs, and longer with kube-proxy.
    """
    if earlier:
        comparison = from_json(earlier.read_bytes(), str(earlier))
    else:
        chosen = (_QUICK if quick else _DEFAULTS) | {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in sizes.items()
            if value is not None
        }
        method = Method(
            command=shlex.join(["ebpfproxy", *sys.argv[1:]]),
            modes=tuple(modes or proxies.available(kube_proxy)),
            cases=tuple(cases),
            endpoints=endpoints,
            limit=limit,
            cpu=one_cpu(),
            **chosen,
        )
        with steps() as progress:
            comparison = compare.run(method, progress, kube_proxy)
    for path in outputs:
        path.write_bytes(_content(comparison, path.suffix))
        click.echo(f"wrote {path}", err=True)
    console(piped_width=_PIPED).print(table(comparison))
    for each in comparison.left_out:
        click.echo(
            f"left out with {each.services:,} Services: {each.mode}, whose start took longer than "
            f"{comparison.method.limit:g} s (--limit)"
        )


def _content(comparison: Comparison, suffix: str) -> bytes:
    if suffix == ".json":
        return comparison.to_json()
    return (comparison.to_csv() if suffix == ".csv" else html_report.page(comparison)).encode()


def table(comparison: Comparison) -> Table:
    """Return a table with a row for each case and number of Services, and a column for each mode."""
    method = comparison.method
    found = Table(title="bench compare: medians, and ratios with their 95 % confidence interval")
    found.box, found.pad_edge, found.title_justify = box.SIMPLE_HEAD, False, "left"
    for name in ("metric", "Services"):
        found.add_column(name, no_wrap=True)
    for mode in method.modes:
        found.add_column(mode, justify="right")
    for metric, services in dict.fromkeys((each.metric, each.services) for each in comparison.figures):
        cells = (_cell(comparison, metric, services, mode) for mode in method.modes)
        found.add_row(metric, f"{services:,}", *cells)
    return found


def _cell(comparison: Comparison, metric: str, services: int, mode: str) -> str:
    for each in comparison.figures:
        if (each.metric, each.services, each.mode) == (metric, services, mode):
            if each.ratio is None:
                return f"{each.median:,.4g}"
            return f"{each.ratio.median:.2f} ({each.ratio.low:.2f}–{each.ratio.high:.2f})"
    return ""
