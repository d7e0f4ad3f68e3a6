"""``ebpfproxy monitor``: shows new connections and their fate as they happen."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ebpfproxy.cli.epilog import examples
from ebpfproxy.cli.service_names import complete_service
from ebpfproxy.config import FlagsCommand, options
from ebpfproxy.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from ebpfproxy.backends.ebpf.inspect.events import Event, EventReader, Lost
    from ebpfproxy.cli.otlp import EventExporter

VERDICTS = ("new", "rejected", "dropped", "reset", "affinity", "reconnected")
_POLL_SECONDS, _RENEW_SECONDS = 0.05, 1.0
_NEEDS_EBPF = "use an agent with --proxy-mode=ebpf; in the other modes see `conntrack -E`"


class _Enough(Exception):
    """--count events were shown."""


@click.command(
    "monitor",
    cls=FlagsCommand,
    epilog=examples("""
    # Show the connections to a Service that fail, until Ctrl-C.
    ebpfproxy monitor --service=default/web --verdict=rejected --verdict=dropped
    # Show ten connections of a pod as JSON lines.
    ebpfproxy monitor --from=10.244.1.7 -o json --count=10
    # Export failures to an OpenTelemetry Collector.
    ebpfproxy monitor --verdict=rejected --verdict=dropped --otlp=http://localhost:4318
    """),
)
@click.option(
    "--service",
    metavar="NS/NAME[:PORT]",
    default="",
    shell_complete=complete_service,
    help="Only events of this Service.",
)
@click.option(
    "--from",
    "client",
    metavar="IP",
    default="",
    help='Only events of clients with this address, or "node" for processes in the node\'s own network '
    "namespace.",
)
@click.option(
    "--verdict",
    "verdicts",
    type=click.Choice(VERDICTS),
    multiple=True,
    help="Only events of this kind. Can be given several times.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    help="Output format. Default: text; with --otlp, events are printed only with -o.",
)
@click.option(
    "--otlp",
    is_flag=False,
    flag_value="",
    metavar="[URL]",
    help="Export events as log records to an OpenTelemetry receiver, by OTLP over HTTP. URL is without "
    "/v1/logs. Default: that of OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318. It needs the Python "
    "package opentelemetry-exporter-otlp-proto-http: pip install 'ebpfproxy[otlp]'.",
)
@click.option(
    "--rate",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    metavar="N",
    help="The most events in a second. The others are counted. 0: no limit.",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after this number of events.")
@click.option("--seconds", type=click.FloatRange(0), metavar="N", help="End after this time.")
@options("bpffs_root")
def command(
    service: str,
    client: str,
    verdicts: tuple[str, ...],
    output: str | None,
    otlp: str | None,
    rate: int,
    count: int | None,
    seconds: float | None,
    bpffs_root: Path,
) -> int:
    """Show new connections to Services as they happen, in mode ebpf, until Ctrl-C:

    \b
    new          a connection or flow was redirected to an endpoint
    rejected     the client got an error, with the reason
    dropped      the client got no reply, with the reason
    reset        the client or the endpoint reset a flow of the packet path
    affinity     a new connection of a client with session affinity
    reconnected  a UDP socket connected to the same frontend again

    Programs record events only while monitor or top runs. Events that were lost are counted. One of them
    can run for each agent at a time.
    """
    from ebpfproxy.backends.ebpf.inspect.events import EventReader

    exporter = None if otlp is None else _exporter(otlp)
    kinds = {"new" if verdict == "affinity" else verdict for verdict in verdicts}
    kinds |= {"reconnected"} if "affinity" in verdicts else set()
    with (
        _ending(),
        needs_ebpf(),
        contextlib.closing(EventReader(bpffs_root, service, kinds, rate, parse_client(client))) as reader,
    ):
        printed = output or ("" if exporter else "text")
        _follow(reader, _Output(printed, exporter, frozenset(verdicts), count), seconds)
    return 0


def _exporter(url: str) -> "EventExporter":
    try:
        from ebpfproxy.cli.otlp import EventExporter
    except ImportError:
        raise ConfigError(
            "--otlp needs the Python package opentelemetry-exporter-otlp-proto-http",
            "pip install 'ebpfproxy[otlp]'",
        ) from None
    return EventExporter(url)


@contextlib.contextmanager
def needs_ebpf() -> Iterator[None]:
    """Explain that another mode has no events."""
    try:
        yield
    except NotFound as failure:
        if failure.message.startswith("no maps of mode ebpf"):
            raise NotFound(f"events need mode ebpf: {failure.message}", _NEEDS_EBPF) from None
        raise


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """End without an error after --count events, Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # of background processes, SIGINT is ignored
    with contextlib.suppress(_Enough, KeyboardInterrupt):
        yield


def parse_client(text: str) -> str:
    """The canonical text of an address; "node" and the empty text stay.

    >>> parse_client("FD00:0::1")
    'fd00::1'

    Raises ConfigError.
    """
    from ebpfproxy.model.address import format_address, parse_address

    if text in ("", "node"):
        return text
    try:
        return format_address(parse_address(text))
    except ValueError:
        raise ConfigError(
            f"--from: {text!r} is not an address", 'write 10.244.1.7, fd00::1 or "node"'
        ) from None


def _follow(reader: "EventReader", shown: "_Output", seconds: float | None) -> None:
    end = None if seconds is None else time.monotonic() + seconds
    renewal = time.monotonic() + _RENEW_SECONDS
    try:
        while end is None or time.monotonic() < end:
            reader.read(shown.event)
            shown.flush()
            if time.monotonic() >= renewal:
                renewal = time.monotonic() + _RENEW_SECONDS
                reader.renew()
                shown.lost(reader.lost())
            time.sleep(_POLL_SECONDS)
        reader.read(shown.event)
    finally:
        with contextlib.suppress(BrokenPipeError):
            shown.close(reader.lost())


class _Output:
    """Prints events, exports them, or both. Lines are written in batches, after each reading of the ring
    buffer.

    `printed`: "text", "json", or "" to print only how many events were lost.
    """

    def __init__(
        self, printed: str, exporter: "EventExporter | None", verdicts: frozenset[str], count: int | None
    ) -> None:
        formats: dict[str, Callable[[Event], str]] = {"json": _as_json, "text": _as_text}
        self._format = formats.get(printed)
        self._json, self._exporter, self._verdicts, self._left = printed == "json", exporter, verdicts, count
        self._lines: list[str] = []
        self._not_recorded: tuple[int, int] = (0, 0)
        self._not_exported = 0

    def event(self, event: "Event") -> None:
        if self._verdicts and not self._is_wanted(event):
            return
        if self._format:
            self._lines.append(self._format(event))
        if self._exporter:
            self._exporter.event(event)
        if self._left is not None:
            self._left -= 1
            if not self._left:
                raise _Enough

    def _is_wanted(self, event: "Event") -> bool:
        return event.event in self._verdicts or ("affinity" in self._verdicts and bool(event.affinity))

    def lost(self, lost: "Lost") -> None:
        """Show the lost events, if there are more than before."""
        not_exported = self._exporter.lost if self._exporter else 0
        if (lost, not_exported) == (self._not_recorded, self._not_exported):
            return
        if self._exporter and lost != self._not_recorded:
            self._exporter.missed(lost)
        self._not_recorded, self._not_exported = lost, not_exported
        if self._json:
            exported = {"export": not_exported} if self._exporter else {}
            self._lines.append(_encoded({"event": "lost", **lost._asdict(), **exported}))
            return
        text = f"# events lost so far: {lost.rate} over the rate, {lost.buffer} for lack of room"
        self._lines.append(text + (f", {not_exported} not exported" if self._exporter else ""))

    def close(self, lost: "Lost") -> None:
        """Write and export what is left, and show the lost events."""
        self.lost(lost)
        if self._exporter:
            self._exporter.close()
            self.lost(lost)
        self.flush()

    def flush(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()


def _encoded(fields: dict[str, object]) -> str:
    import msgspec

    return msgspec.json.encode(fields).decode()


def _as_json(event: "Event") -> str:
    return _encoded(event._asdict())


def _as_text(event: "Event") -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    return f"{clock}.{int(event.time % 1 * 1000):03} {event.event:11} {describe(event)}"


def describe(event: "Event") -> str:
    """The fields of an event for a reader, without its time and kind."""
    affinity = f"affinity {event.affinity}" if event.affinity else ""
    parts = (
        event.service,
        event.protocol,
        " -> ".join(filter(None, (event.client, event.frontend, event.endpoint))),
        ", ".join(filter(None, (event.reason, affinity))),
    )
    return " ".join(filter(None, parts))
