"""The charts of a comparison, as SVG without external references. Needs matplotlib: see `require`.

Colors are the placeholders of `chart_colors`, so that one chart serves light and dark pages.
"""

import importlib.util
import io
import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ebpfproxy.bench import kube_proxy
from ebpfproxy.bench.chart_colors import placeholders
from ebpfproxy.bench.results import Comparison, Figure
from ebpfproxy.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

_PANELS_IN_A_ROW = 3
_PANEL = (3.7, 2.9)
"""Width and height of a panel, in inches of 72 points."""

_LEGEND_COLUMNS = {1: 2, 2: 4, 3: 7}
"""The columns of a legend, by the panels in a row."""

TITLES = {
    "connect_us": "New TCP connection to a ClusterIP",
    "request_us": "Request on an open connection",
    "udp_us": "UDP request on an open socket",
    "dns_us": "UDP request with a new socket (DNS)",
    "nodeport_us": "New connection and request, NodePort",
    "throughput_mbit_s": "Throughput of one TCP stream",
    "packet_ns": "One datagram through a NodePort",
    "startup_s": "Start until the last Service answers",
    "change_ms": "Change of an endpoint",
    "memory_mb": "Memory of the proxy",
}
"""The title of each metric."""

UNITS = {"us": "µs", "ns": "ns", "ms": "ms", "s": "s", "mb": "MB", "mbit_s": "Mbit/s"}

_WIDE = 3.0
"""A chart with a ratio above this one has a logarithmic axis, so that small ratios can be compared."""

_LATENCIES = ("connect_us", "request_us", "udp_us", "dns_us", "nodeport_us")


class Chart(NamedTuple):
    """A chart: its name, title, how to read it, its SVG with placeholders, and the panels in a row of it."""

    name: str
    title: str
    caption: str
    svg: str
    columns: int


def require() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "cannot draw the charts of the HTML report: matplotlib is not installed",
            "install it: pip install 'ebpfproxy[bench]', or write only .json and .csv files",
        )


def unit(metric: str) -> str:
    """Return the unit of a metric.

    >>> unit("throughput_mbit_s"), unit("connect_us")
    ('Mbit/s', 'µs')
    """
    suffix = max((each for each in UNITS if metric.endswith(f"_{each}")), key=len)
    return UNITS[suffix]


def all_charts(comparison: Comparison) -> list[Chart]:
    """Draw all charts for which there are figures. Raises ConfigError without matplotlib."""
    require()
    candidates = [
        (
            "ratios",
            "Cost of a Service",
            "Ratio to the same traffic without a proxy: median of all rounds, with its 95 % confidence "
            "interval. The line at 1 is no proxy; lower is better, for throughput higher. An axis with large "
            "ratios is logarithmic.",
            [*_LATENCIES, "throughput_mbit_s"],
            _draw_ratios,
        ),
        (
            "distributions",
            "Distribution of latencies",
            "A box is the middle half of all samples, with the median; whiskers reach from the 5th to the "
            "95th percentile, and a point is the 99th. The vertical axes are logarithmic.",
            _LATENCIES,
            _draw_boxes,
        ),
        (
            "packet",
            "Cost per packet",
            "Time of send() of a client outside. Its datagram passes the node and is dropped in the pod.",
            ["packet_ns"],
            _draw_bars,
        ),
        (
            "changes",
            "Start and change",
            "Medians; bars reach from the 5th to the 95th percentile. The vertical axes are logarithmic.",
            ["startup_s", "change_ms"],
            _draw_lines,
        ),
        (
            "memory",
            "Memory",
            "Resident memory of the process after a start and changes, without tools that it starts.",
            ["memory_mb"],
            _draw_lines,
        ),
    ]
    return [
        Chart(name, title, caption, _drawn(comparison, name, metrics, draw), _columns(metrics))
        for name, title, caption, wanted, draw in candidates
        if (metrics := [metric for metric in wanted if _has(comparison, metric, draw)])
    ]


def _columns(metrics: Sequence[str]) -> int:
    return min(_PANELS_IN_A_ROW, len(metrics))


def _has(comparison: Comparison, metric: str, draw: "_Draw") -> bool:
    figures = [each for each in comparison.figures if each.metric == metric]
    return any(each.ratio for each in figures) if draw is _draw_ratios else bool(figures)


_Draw = Callable[["Axes", Comparison, str, "_Style"], None]


class _Style:
    """The color, line and marker of each mode."""

    def __init__(self, modes: Sequence[str]) -> None:
        self.colors = placeholders(modes)
        markers = itertools.cycle("osD^v<>P")
        self._markers = {mode: next(markers) for mode in modes}

    def line(self, mode: str) -> dict[str, Any]:
        is_foreign = mode.startswith(kube_proxy.PREFIX)
        return {
            "color": self.colors[mode],
            "marker": self._markers[mode],
            "linestyle": "--" if is_foreign else "-",
            "markerfacecolor": self.colors["page"] if is_foreign else self.colors[mode],
            "label": mode,
            "linewidth": 1.4,
            "markersize": 4.5,
            "capsize": 2.0,
        }

    def box(self, mode: str) -> dict[str, Any]:
        is_foreign = mode.startswith(kube_proxy.PREFIX)
        return {
            "facecolor": self.colors["page"] if is_foreign else self.colors[mode],
            "edgecolor": self.colors[mode],
        }


def _drawn(comparison: Comparison, name: str, metrics: Sequence[str], draw: _Draw) -> str:
    """Draw a panel for each metric, and one legend. `name` makes the IDs of the SVG unique in a page."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    style = _Style(comparison.method.modes)
    columns = _columns(metrics)
    rows = -(-len(metrics) // columns)
    with mpl.rc_context(_settings(style, name)):
        drawing = Drawing(figsize=(_PANEL[0] * columns, _PANEL[1] * rows + 0.5), layout="constrained")
        FigureCanvasSVG(drawing)
        panels = drawing.subplots(rows, columns, squeeze=False).flat
        for axes, metric in itertools.zip_longest(panels, metrics):
            if metric is None:
                axes.set_axis_off()
                continue
            axes.set_title(TITLES[metric])
            draw(axes, comparison, metric, style)
        _add_legend(drawing, _LEGEND_COLUMNS[columns])
        return _svg(drawing, name)


def _settings(style: _Style, name: str) -> Any:
    text, muted, grid = (style.colors[each] for each in ("text", "muted", "grid"))
    return {
        "svg.fonttype": "none",  # text stays text: searchable, and in the page's font
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": text,
        "axes.labelcolor": muted,
        "axes.titlecolor": text,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.edgecolor": grid,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "xtick.color": grid,
        "ytick.color": grid,
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
    }


def _add_legend(drawing: "Drawing", columns: int) -> None:
    """Add one legend for all panels, above them."""
    handles: dict[str, Any] = {}
    for axes in drawing.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    drawing.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=columns)


def _svg(drawing: "Drawing", name: str) -> str:
    """Return the element <svg> alone, scaled to the width of the page."""
    stream = io.StringIO()
    drawing.savefig(
        stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?)\s+width="[\d.]+pt"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?)\s+height="[\d.]+pt"', r"\1", svg, count=1)
    # IDs are unique in a page only with the chart's name.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    return re.sub(r"url\(#", f"url(#{name}-", svg)


def _positions(comparison: Comparison, metric: str) -> list[int]:
    """Return the numbers of Services that the metric has, ascending: the ticks of the x axis."""
    return sorted({each.services for each in comparison.figures if each.metric == metric})


def _label_services(axes: "Axes", counts: Sequence[int]) -> None:
    axes.set_xticks(range(len(counts)), [f"{count:,}" for count in counts])
    axes.set_xlim(-0.5, len(counts) - 0.5)
    axes.set_xlabel("Services")


def _offset(at: int, of: int, width: float) -> float:
    """Return where the item `at` of `of` is, so that all together are `width` wide and centered."""
    return (at - (of - 1) / 2) * width / max(1, of)


def _draw_ratios(axes: "Axes", comparison: Comparison, metric: str, style: _Style) -> None:
    counts = _positions(comparison, metric)
    by_mode = {mode: figures for mode, figures in comparison.of(metric).items() if figures[0].ratio}
    for at, (mode, figures) in enumerate(by_mode.items()):
        found = [(each.services, each.ratio) for each in figures if each.ratio]
        axes.errorbar(
            [counts.index(count) + _offset(at, len(by_mode), 0.3) for count, _ in found],
            [ratio.median for _, ratio in found],
            yerr=[
                [ratio.median - ratio.low for _, ratio in found],
                [ratio.high - ratio.median for _, ratio in found],
            ],
            **style.line(mode),
        )
    axes.axhline(1.0, color=style.colors["none"], linewidth=1.0)
    if max(figure.ratio.high for figures in by_mode.values() for figure in figures if figure.ratio) > _WIDE:
        axes.set_yscale("log")
        _plain_ticks(axes)
    axes.set_ylabel("ratio to no proxy")
    _label_services(axes, counts)


def _draw_boxes(axes: "Axes", comparison: Comparison, metric: str, style: _Style) -> None:
    counts = _positions(comparison, metric)
    by_mode = comparison.of(metric)
    width = 0.75
    for at, (mode, figures) in enumerate(by_mode.items()):
        color = style.colors[mode]
        result = axes.bxp(
            [_box(each) for each in figures],
            positions=[counts.index(each.services) + _offset(at, len(by_mode), width) for each in figures],
            widths=width / len(by_mode) * 0.8,
            manage_ticks=False,
            patch_artist=True,
            boxprops={**style.box(mode), "linewidth": 0.8},
            medianprops={"color": style.colors["text"], "linewidth": 1.0},
            whiskerprops={"color": color, "linewidth": 0.8},
            capprops={"color": color, "linewidth": 0.8},
            flierprops={"marker": ".", "markersize": 3, "markeredgecolor": color, "markerfacecolor": color},
        )
        result["boxes"][0].set_label(mode)
    axes.set_yscale("log")
    _plain_ticks(axes)
    axes.set_ylabel(unit(metric))
    _label_services(axes, counts)


def _box(figure: Figure) -> dict[str, Any]:
    return {
        "whislo": figure.at(0.05),
        "q1": figure.at(0.25),
        "med": figure.median,
        "q3": figure.at(0.75),
        "whishi": figure.at(0.95),
        "fliers": [figure.at(0.99)],
    }


def _draw_bars(axes: "Axes", comparison: Comparison, metric: str, style: _Style) -> None:
    counts = _positions(comparison, metric)
    by_mode = comparison.of(metric)
    width = 0.8
    for at, (mode, figures) in enumerate(by_mode.items()):
        axes.bar(
            [counts.index(each.services) + _offset(at, len(by_mode), width) for each in figures],
            [each.median for each in figures],
            width / len(by_mode) * 0.85,
            yerr=[
                [each.median - each.at(0.05) for each in figures],
                [each.at(0.95) - each.median for each in figures],
            ],
            error_kw={"ecolor": style.colors["muted"], "linewidth": 0.8},
            label=mode,
            **style.box(mode),
        )
    axes.set_ylabel(unit(metric))
    _label_services(axes, counts)


def _draw_lines(axes: "Axes", comparison: Comparison, metric: str, style: _Style) -> None:
    counts = _positions(comparison, metric)
    by_mode = comparison.of(metric)
    for at, (mode, figures) in enumerate(by_mode.items()):
        axes.errorbar(
            [counts.index(each.services) + _offset(at, len(by_mode), 0.3) for each in figures],
            [each.median for each in figures],
            yerr=[
                [each.median - each.at(0.05) for each in figures],
                [each.at(0.95) - each.median for each in figures],
            ],
            **style.line(mode),
        )
    axes.set_yscale("log")
    _plain_ticks(axes)
    axes.set_ylabel(unit(metric))
    _label_services(axes, counts)


def _plain_ticks(axes: "Axes") -> None:
    """Label a logarithmic axis with numbers instead of powers, and between the powers if it is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_ylim()
    steps = range(1, 10) if high / low < 5 else (1, 2, 5) if high / low < 300 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
