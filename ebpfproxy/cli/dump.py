"""``ebpfproxy dump``: shows the content of the BPF maps."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ebpfproxy.cli import dump_sections
from ebpfproxy.cli.dump_sections import SECTIONS, SUBJECTS, Filter
from ebpfproxy.cli.dump_source import from_dump_option, open_view
from ebpfproxy.cli.rows import WRITERS
from ebpfproxy.config import Config, FlagsCommand, config_options
from ebpfproxy.errors import ConfigError

if TYPE_CHECKING:
    from ebpfproxy.backends.ebpf.inspect.saved import Header, SavedView
    from ebpfproxy.backends.ebpf.inspect.tables import View

_NOT_COUNTED = "note: traffic is not counted by Service: the agent runs with --ebpf-traffic-max=0"


@click.command("dump", cls=FlagsCommand)
@click.argument("what", type=click.Choice(list(SUBJECTS)), default="services", metavar="WHAT")
@click.option(
    "-o",
    "--output",
    type=click.Choice(list(WRITERS)),
    default="table",
    show_default=True,
    help="Output format.",
)
@click.option(
    "--service",
    metavar="NS/NAME[:PORT]",
    default="",
    help="Show only entries of this Service, or of one of its ports. Empty: all Services.",
)
@click.option(
    "--address",
    metavar="IP[:PORT]",
    default="",
    help="Show only entries with this address as client, frontend or endpoint. Write IPv6 with a port as "
    "[IP]:PORT. Empty: all addresses.",
)
@from_dump_option
@config_options
def command(
    what: str, output: str, service: str, address: str, from_dump: Path | None, config: Config
) -> None:
    """Show the content of the BPF maps of mode ebpf. WHAT is one of:

    \b
    services   frontends and their endpoints; this is the default
    endpoints  endpoints, and the connections that can select them
    ranges     source ranges of Services
    affinity   clients with session affinity
    sockets    sockets that were redirected to an endpoint
    conntrack  flows of the packet path
    nat        translation steps of these flows
    devices    devices of the packet path, and the programs on them
    networks   networks of the node, and those that serve NodePorts
    settings   settings of the programs
    counters   events in the programs, and traffic (by Service with --ebpf-traffic-max)
    maps       use of each map
    all        all of these

    Reads only the pinned maps, so it works with and without a running agent. Save a dump with
    `ebpfproxy dump all -o json > FILE`, and read it anywhere with --from-dump FILE.
    """
    row_filter = Filter(service, *dump_sections.parse_address_filter(address))
    names = [name for name in SUBJECTS[what] if SECTIONS[name].supports(row_filter)]
    if not names:
        flag = "--service" if service else "--address"
        raise ConfigError(f"cannot filter {what} by {flag}", f"leave {flag} out")
    with contextlib.closing(open_view(config.bpffs_root, from_dump)) as view:
        if "traffic" in names and not view.counts_services:
            click.echo(_NOT_COUNTED, err=True)
        header = _header(view, row_filter, config)._asdict() if what == "all" else None
        sections = ((name, dump_sections.rows(view, name, row_filter)) for name in names)
        WRITERS[output](sections, len(SUBJECTS[what]) > 1, header)


def _header(view: "View | SavedView", row_filter: Filter, config: Config) -> "Header":
    from ebpfproxy.backends.ebpf.inspect.saved import SavedView, new_header

    if isinstance(view, SavedView):
        return view.header._replace(filters=[*view.header.filters, *row_filter.flags()])
    return new_header(config.node_name, "ebpf", row_filter.flags())
