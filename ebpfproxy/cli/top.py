"""``ebpfproxy top``: Services and endpoints with the most new connections."""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.monitor import needs_ebpf
from ebpfproxy.cli.rows import WRITERS, Row
from ebpfproxy.cli.service_names import complete_service
from ebpfproxy.config import FlagsCommand, options
from ebpfproxy.errors import ConfigError

if TYPE_CHECKING:
    from ebpfproxy.backends.ebpf.inspect.rates import EndpointRate, Rates, Sample, ServiceRate

_POLL_SECONDS = 0.05


@click.command(
    "top",
    cls=FlagsCommand,
    epilog=examples("""
    # Show the Services with the most connections, until q.
    ebpfproxy top
    # Print the rates of the next ten seconds.
    ebpfproxy top --once --interval=10
    """),
)
@click.option("--once", is_flag=True, help="Print one sample and end. It needs no terminal.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="The duration of a sample.",
)
@click.option(
    "--service",
    metavar="NS/NAME[:PORT]",
    default="",
    shell_complete=complete_service,
    help="Only this Service.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(list(WRITERS)),
    default="table",
    show_default=True,
    help="Output format of --once.",
)
@options("bpffs_root")
def command(once: bool, interval: float, service: str, output: str, bpffs_root: Path) -> None:
    """Show the Services and endpoints with the most new connections per second, in mode ebpf.

    Errors are connections that were rejected, dropped or reset. Bytes are those of the packet path, if the
    agent counts them by Service (--ebpf-traffic-max). The live view needs the Python package textual:
    pip install 'ebpfproxy[top]'. One monitor or top can run for each agent.
    """
    from ebpfproxy.backends.ebpf.inspect.rates import Rates

    if not once:
        _require_live_view(output)
    with needs_ebpf(), contextlib.closing(Rates(bpffs_root, service)) as rates:
        if once:
            _print(sample(rates, interval), output)
        else:
            from ebpfproxy.cli.top_view import TopView

            TopView(rates, interval).run()


def _require_live_view(output: str) -> None:
    if output != "table" or not sys.stdout.isatty():
        raise ConfigError("the live view needs a terminal and has no other format", "add --once")
    try:
        import textual  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the live view needs the Python package textual", "pip install 'ebpfproxy[top]', or add --once"
        ) from None


def sample(rates: "Rates", seconds: float) -> "Sample":
    """The rates of the next `seconds`."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(_POLL_SECONDS, left))
        rates.collect()
    return rates.take()


def _print(found: "Sample", output: str) -> None:
    as_is = output != "table"
    sections: list[tuple[str, list[Row]]] = [
        ("services", [each._asdict() if as_is else service_cells(each) for each in found.services]),
        ("endpoints", [each._asdict() if as_is else endpoint_cells(each) for each in found.endpoints]),
    ]
    WRITERS[output](sections, True, None)
    if any(found.lost):
        click.echo(f"note: the events of {sum(found.lost)} connections were lost", err=True)


def service_cells(row: "ServiceRate") -> Row:
    """The texts of a Service by column. Unknown bytes are "-"."""
    return {
        "service": row.service,
        "connections/s": row.connections,
        "errors/s": row.errors,
        "bytes/s": "-" if row.bytes is None else f"{row.bytes:,.0f}",
    }


def endpoint_cells(row: "EndpointRate") -> Row:
    """The texts of an endpoint by column."""
    return {
        "service": row.service,
        "endpoint": row.endpoint,
        "connections/s": row.connections,
        "errors/s": row.errors,
    }
