"""``ebpfproxy dump``: shows the content of the BPF maps."""

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ebpfproxy.cli import dump_diff, dump_sections, dump_watch
from ebpfproxy.cli.dump_sections import SECTIONS, SUBJECTS, Filter
from ebpfproxy.cli.dump_source import from_dump_option, open_view
from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.rows import WRITERS, Row
from ebpfproxy.cli.service_names import complete_service
from ebpfproxy.config import Config, FlagsCommand, config_options
from ebpfproxy.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from ebpfproxy.backends.ebpf.inspect.saved import Header, SavedView
    from ebpfproxy.backends.ebpf.inspect.tables import View

_OBJECTS = "objects"
_CONNECTIONS = "connections"
_NAMESPACES = "namespaces"
_DIFFERENT = 1
_NOT_COUNTED = "note: traffic is not counted by Service: the agent runs with --ebpf-traffic-max=0"


@click.command(
    "dump",
    cls=FlagsCommand,
    epilog=examples("""
    # Show all frontends and their endpoints.
    ebpfproxy dump
    # Show the flows of one Service, and then their changes.
    ebpfproxy dump conntrack --service=default/web
    ebpfproxy dump conntrack --service=default/web --watch
    # Find the Service of an address.
    ebpfproxy dump --address=10.96.0.10:80 -o yaml
    # Compare the kernel with the cluster, with the agent's flags. This works in all modes.
    ebpfproxy dump --diff --config=/etc/ebpfproxy/config.conf
    # Save everything, and read it on any machine.
    ebpfproxy dump all -o json > node1.json
    ebpfproxy dump services --from-dump=node1.json
    """),
)
@click.argument(
    "what",
    type=click.Choice([*SUBJECTS, _NAMESPACES, _OBJECTS, _CONNECTIONS]),
    default="services",
    metavar="WHAT",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(list(WRITERS)),
    default="table",
    show_default=True,
    help="Output format. wide: a table that includes ids and the raw keys of map entries.",
)
@click.option(
    "--service",
    metavar="NS/NAME[:PORT]",
    shell_complete=complete_service,
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
@click.option(
    "--diff",
    is_flag=True,
    help="Show what differs between the kernel and the cluster: - is only in the kernel, + is only desired. "
    "Works in all modes, with the agent's flags. Exit code 1: something differs.",
)
@click.option(
    "--drift",
    is_flag=True,
    help="Compare the kernel with the cluster, and mark the entries that differ in the column DRIFTED.",
)
@click.option(
    "-w",
    "--watch",
    is_flag=True,
    help="After the entries, show their changes until an interrupt: + added, - removed, ~ changed. With "
    "-o json, each line is an object.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch, the time between two readings.",
)
@from_dump_option
@config_options
def command(
    what: str,
    output: str,
    service: str,
    address: str,
    diff: bool,
    drift: bool,
    watch: bool,
    interval: float,
    from_dump: Path | None,
    config: Config,
) -> int:
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
    namespaces  network namespaces of pods and guests, and the path of their sockets
    objects    all objects that verify compares, in any mode
    connections  connections and UDP flows of relays: mode userspace, and loopback in mode nftables

    Works with and without a running agent: it reads the pinned maps. Only --diff and --drift also read the
    cluster, and --diff and objects read the kernel in any mode. The column ORPHANED shows entries that belong
    to nothing any more: their Service, frontend, list, endpoint or device is gone. Save a dump with
    `ebpfproxy dump all -o json > FILE`, and read it anywhere with --from-dump=FILE.
    """
    _check_combination(what, output, service or address, diff, drift, watch, from_dump)
    if diff:
        found = dump_diff.read(config, from_dump)
        dump_diff.show(found, output)
        return _DIFFERENT if found.objects else 0
    if what == _OBJECTS:
        read = dump_diff.objects(config, from_dump)
        _show_or_watch(lambda: {_OBJECTS: read()}, output, False, interval if watch else None)
        return 0
    row_filter = Filter(service, *dump_sections.parse_address_filter(address))
    if what == _CONNECTIONS:
        _show_or_watch(
            lambda: {what: dump_sections.connections(row_filter)}, output, False, interval if watch else None
        )
        return 0
    if what == _NAMESPACES:
        _show_or_watch(
            lambda: {what: dump_sections.namespaces(config)}, output, False, interval if watch else None
        )
        return 0
    names = [name for name in SUBJECTS[what] if SECTIONS[name].supports(row_filter)]
    if not names:
        flag = "--service" if service else "--address"
        raise ConfigError(f"cannot filter {what} by {flag}", f"leave {flag} out")
    if watch:
        _show_or_watch(
            lambda: _read_all(names, row_filter, config), output, len(SUBJECTS[what]) > 1, interval
        )
        return 0
    mark = _marker(config, from_dump) if drift else lambda section, row: row
    with contextlib.closing(open_view(config.bpffs_root, from_dump)) as view:
        if "traffic" in names and not view.counts_services:
            click.echo(_NOT_COUNTED, err=True)
        header = _header(view, row_filter, config)._asdict() if what == "all" else None
        sections = (
            (name, map(partial(mark, name), dump_sections.rows(view, name, row_filter))) for name in names
        )
        WRITERS[output](sections, len(SUBJECTS[what]) > 1, header)
    return 0


def _check_combination(
    what: str, output: str, has_filter: str, diff: bool, drift: bool, watch: bool, from_dump: Path | None
) -> None:
    """Raises ConfigError for flags that exclude each other."""
    given = {
        "--diff": diff,
        "--drift": drift,
        "--watch": watch,
        "--from-dump": bool(from_dump),
        "-o yaml": output == "yaml",
        "--service or --address": bool(has_filter),
        what: what not in ("services", "all"),
        _OBJECTS: what == _OBJECTS,
        _CONNECTIONS: what == _CONNECTIONS,
        _NAMESPACES: what == _NAMESPACES,
    }
    excluding = (
        ("--diff", ("--drift", "--watch", "--service or --address", what)),
        ("--drift", ("--watch", _OBJECTS, _CONNECTIONS, _NAMESPACES)),
        (_CONNECTIONS, ("--from-dump",)),
        (_NAMESPACES, ("--from-dump", "--service or --address")),
        ("--watch", ("--from-dump", "-o yaml")),
        (_OBJECTS, ("--service or --address",)),
    )
    for one, others in excluding:
        for other in others:
            if given[one] and given[other]:
                raise ConfigError(f"cannot combine {one} with {other}", f"leave {other} or {one} out")


def _marker(config: Config, from_dump: Path | None) -> Callable[[str, Row], Row]:
    found = dump_diff.read(config, from_dump)
    if note := dump_diff.note_of_missing(found):
        click.echo(note, err=True)
    return dump_diff.marker(found)


def _read_all(names: list[str], row_filter: Filter, config: Config) -> dict[str, list[Row]]:
    """Open the maps and read these sections."""
    with contextlib.closing(open_view(config.bpffs_root, None)) as view:
        return {name: list(dump_sections.rows(view, name, row_filter)) for name in names}


def _show_or_watch(
    read: Callable[[], dict[str, list[Row]]], output: str, titled: bool, interval: float | None
) -> None:
    """Show the rows, and with an interval their changes until an interrupt.

    Everything is opened for each reading, because the agent may replace it. It may also remove it: then the
    previous rows stay.
    """
    found = False

    def read_again() -> dict[str, list[Row]]:
        nonlocal found
        try:
            reading = read()
        except NotFound:
            if not found:
                raise
            return {}
        found = True
        return reading

    def show(reading: dump_watch.Reading) -> None:
        sections: Iterable[tuple[str, Iterable[Row]]] = reading.items()
        WRITERS[output](sections, titled, None)

    if interval is None:
        show(read())
        return
    with contextlib.suppress(KeyboardInterrupt):
        dump_watch.follow(read_again, interval, show, output)


def _header(view: "View | SavedView", row_filter: Filter, config: Config) -> "Header":
    from ebpfproxy.backends.ebpf.inspect.saved import SavedView, new_header

    if isinstance(view, SavedView):
        return view.header._replace(filters=[*view.header.filters, *row_filter.flags()])
    return new_header(config.node_name, "ebpf", row_filter.flags())
