"""The live view of `top`. Only this module imports textual, which is an optional dependency."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from textual.app import App, ComposeResult
from textual.widgets import DataTable, Footer, Static

from ebpfproxy.cli.rows import Row
from ebpfproxy.cli.top import endpoint_cells, service_cells

if TYPE_CHECKING:
    from ebpfproxy.backends.ebpf.inspect.rates import Sample

_POLL_SECONDS = 0.1
_MAX_ROWS = 200


class Source(Protocol):
    """What the view needs of `Rates`."""

    def collect(self) -> None: ...
    def take(self) -> "Sample": ...


class TopView(App[None]):
    """Two tables, which are replaced after each interval. The highest rates are at the top."""

    TITLE = "ebpfproxy top"
    CSS = "DataTable { height: 1fr; } Static { height: 1; }"
    BINDINGS: ClassVar = [("q", "quit", "Quit"), ("p", "pause", "Pause")]

    def __init__(self, source: Source, interval: float) -> None:
        """`interval`: seconds between two samples."""
        super().__init__()
        self._source, self._interval = source, interval
        self._paused = False

    def compose(self) -> ComposeResult:
        yield Static(id="status")
        yield DataTable(id="services", cursor_type="none")
        yield DataTable(id="endpoints", cursor_type="none")
        yield Footer()

    def on_mount(self) -> None:
        self._status()
        self.set_interval(_POLL_SECONDS, self._source.collect)
        self.set_interval(self._interval, self._refresh_tables)

    def action_pause(self) -> None:
        """Keep the tables as they are, or continue. Events are counted meanwhile."""
        self._paused = not self._paused
        self._status()

    def _refresh_tables(self) -> None:
        found = self._source.take()
        if self._paused or not self.query(DataTable):  # the tables are removed before the timer ends
            return
        self._fill("services", found.services, service_cells)
        self._fill("endpoints", found.endpoints, endpoint_cells)
        self._status(sum(found.lost))

    def _status(self, lost: int = 0) -> None:
        parts = [
            f"every {self._interval:g} s",
            "paused" if self._paused else "",
            f"{lost} lost" if lost else "",
        ]
        self.query_one("#status", Static).update(", ".join(filter(None, parts)))

    def _fill(self, name: str, rows: Iterable[Any], cells: Callable[[Any], Row]) -> None:
        table = self.query_one(f"#{name}", DataTable)
        table.clear(columns=True)
        lines = [cells(row) for row in list(rows)[:_MAX_ROWS]]
        if not lines:
            table.add_column(f"{name}: no new connections")
            return
        table.add_columns(*(column.upper() for column in lines[0]))
        table.add_rows([str(value) for value in line.values()] for line in lines)
