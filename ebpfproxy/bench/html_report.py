"""The HTML report of a comparison: one file without external references, in light and dark mode."""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ebpfproxy.bench.compare_cases import STREAM_MEGABYTES
from ebpfproxy.bench.results import Comparison, Figure

_STYLE = """\
:root { color-scheme: light dark; --text: #1f2328; --muted: #59636e; --page: #ffffff; --line: #d1d9e0;
  --panel: #f6f8fa; --bar: #54aeff55; }
@media (prefers-color-scheme: dark) { :root { --text: #f0f6fc; --muted: #9198a1; --page: #0d1117;
  --line: #3d444d; --panel: #151b23; --bar: #388bfd55; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 72rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 55rem; }
.muted { color: var(--muted); font-size: .9rem; text-align: left; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page); }
code, pre { font: .85rem/1.4 ui-monospace, monospace; background: var(--panel); border-radius: .3rem; }
code { padding: .1rem .3rem; } pre { padding: .7rem; white-space: pre-wrap; }
details summary { cursor: pointer; padding: .4rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { body { padding: .8rem; } dl { grid-template-columns: 1fr; } }
"""

_TITLES = {
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

_UNITS = {"us": "µs", "ns": "ns", "ms": "ms", "s": "s", "mb": "MB", "mbit_s": "Mbit/s"}

_PATHS = {
    "connect": "A client in a pod connects to the ClusterIP of a random Service: time of connect().",
    "request": "One byte and its answer, on one of 16 open connections from a pod to ClusterIPs.",
    "udp": "One datagram and its answer, on one of 16 connected UDP sockets from a pod to ClusterIPs.",
    "dns": "The same with a new connected UDP socket for each request, as a resolver does.",
    "throughput": f"One TCP stream of {STREAM_MEGABYTES} MiB from a pod to the ClusterIP of a Service.",
    "nodeport": "A client outside connects to a random NodePort, and gets the answer to one byte.",
    "packet": "Time of send() of a client outside. In it, the datagram passes the node through a NodePort "
    "and is dropped in the pod.",
    "startup": "From the start of the process to the first answer of the last Service, on a new node. The "
    "compiled programs of mode ebpf exist, as in the image.",
    "change": "From the write of an EndpointSlice to the API server until a new connection reaches the new "
    "endpoint. All proxies sync without a minimum interval.",
    "memory": "Resident memory of the process after that.",
}
"""What each case measures, and from where."""


def page(comparison: Comparison) -> str:
    """Return the page."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>ebpfproxy bench compare</title>",
        f"<style>\n{_STYLE}</style></head><body>",
        *_heading(comparison),
        *(
            part
            for services in sorted(comparison.method.services, reverse=True)
            for part in _ratios(comparison, services)
        ),
        *_left_out(comparison),
        *_method(comparison),
        *_environment(comparison),
        *_all_figures(comparison),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _heading(comparison: Comparison) -> Iterable[str]:
    method = comparison.method
    yield "<h1>Service proxies compared</h1>"
    yield (
        f'<p class="muted">{_text(", ".join(method.modes))}; '
        f"{_text(', '.join(f'{count:,}' for count in method.services))} Services with {method.endpoints} "
        f"endpoints each; {_text(comparison.environment.ended)}</p>"
    )
    yield (
        "<p>Each mode is a service proxy on a node of its own; mode none has no proxy, and clients connect "
        "to the endpoints directly. A ratio of 1.20 to none means that the same operation takes 20 % longer "
        "than without a proxy.</p>"
    )
    yield (
        "<p>Nodes and wires are network namespaces and veth pairs of one machine, so times apply to this "
        "machine only. Ratios are comparable, because modes take turns.</p>"
    )


def _ratios(comparison: Comparison, services: int) -> Iterable[str]:
    """Yield the ratios with so many Services: a row for each metric, a column for each mode.

    The bar of a cell is as long as the ratio, on a logarithmic scale on which 1 has no bar.
    """
    found = {
        (each.metric, each.mode): each
        for each in comparison.figures
        if each.services == services and each.metric in _TITLES
    }
    bases = {metric: each.base for (metric, _), each in found.items() if each.ratio}
    if not bases:
        return
    modes = [mode for mode in comparison.method.modes if any((metric, mode) in found for metric in bases)]
    most = max(2.0, *(each.ratio.median for each in found.values() if each.ratio))
    yield f"<h2>Ratios with {services:,} Services</h2>"
    yield (
        '<p class="muted">Median, and below it the 95 % confidence interval. Lower is better, except for '
        "throughput. Start, change and memory are compared with the first mode that has them. Bars are "
        "logarithmic.</p>"
    )
    rows = [
        [
            _cell(_text(_TITLES[metric])),
            *(_ratio(found.get((metric, mode)), bases[metric], most) for mode in modes),
        ]
        for metric in _TITLES
        if metric in bases
    ]
    yield _table(["case", *modes], rows)


def _left_out(comparison: Comparison) -> Iterable[str]:
    for each in comparison.left_out:
        yield (
            f"<p>{_text(each.mode)} is not measured with {each.services:,} Services: its start took longer "
            f"than {comparison.method.limit:g} s.</p>"
        )


def _ratio(figure: Figure | None, base: str, most: float) -> str:
    if figure is None:
        return _cell("")
    if figure.ratio is None:
        return _cell("1" if figure.mode == base else "")
    length = round(max(0.0, math.log(max(figure.ratio.median, 1e-9)) / math.log(most)) * 100)
    low, high = _short(figure.ratio.low), _short(figure.ratio.high)
    text = f'{_short(figure.ratio.median)}<br><span class="muted">{low}–{high}</span>'
    return _cell(text, f"background: linear-gradient(to right, var(--bar) {length}%, transparent {length}%)")


def _short(ratio: float) -> str:
    """Return a ratio with two decimals, and with fewer if it is large.

    >>> _short(1.0312), _short(18.179), _short(5366.2)
    ('1.03', '18.2', '5,366')
    """
    decimals = 2 if ratio < 10 else 1 if ratio < 100 else 0
    return f"{ratio:,.{decimals}f}"


def _method(comparison: Comparison) -> Iterable[str]:
    method = comparison.method
    yield "<h2>Method</h2>"
    yield f"<pre>{_text(method.command)}</pre>"
    yield (
        f"<p>Traffic: {method.rounds} rounds of {method.seconds:g} s for each case and mode, in rotating "
        "order, with one node for each mode, all of which exist at the same time. A ratio compares the "
        f"medians of the same round. Start, change and memory: {method.starts} starts for each mode on new "
        f"nodes, with {method.changes} changes each after one that is not measured, or as many as begin "
        f"within {method.limit:g} s. Confidence intervals are bootstrapped over rounds. Each tenth Service "
        "has a UDP port and NodePorts. All proxies get objects from an API server on the node.</p>"
    )
    if method.cpu is not None:
        yield (
            f"<p>Clients and servers share CPU {method.cpu}. On several CPUs, the duration of the same "
            "connection depends on whether the scheduler places both on one of them.</p>"
        )
    yield "<dl>"
    for case in method.cases:
        yield f"<dt>{_text(case)}</dt><dd>{_text(_PATHS[case])}</dd>"
    yield "</dl>"


def _environment(comparison: Comparison) -> Iterable[str]:
    facts = comparison.environment
    rows = {
        "kernel": facts.kernel,
        "CPU": f"{facts.cpu}, {facts.cores} cores",
        "governor": facts.governor or "not controlled by the kernel",
        "memory": f"{facts.memory_gib:g} GiB",
        "load average": f"{facts.load_begin:g} at the beginning, {facts.load_end:g} at the end (one minute)",
        "time": f"{facts.began} to {facts.ended}",
        **facts.versions,
    }
    yield "<h2>Environment</h2><dl>"
    yield from (f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in rows.items())
    yield "</dl>"


def _all_figures(comparison: Comparison) -> Iterable[str]:
    head = ["case", "mode", "Services", "unit", "p5", "p50", "p95", "p99", "n", "ratio", "to"]
    rows = []
    for each in comparison.figures:
        ratio = each.ratio
        cells = (
            each.case,
            each.mode,
            f"{each.services:,}",
            _unit(each.metric),
            *(f"{each.at(share):,.4g}" for share in (0.05, 0.5, 0.95, 0.99)),
            f"{each.n:,}",
            f"{ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})" if ratio else "",
            each.base,
        )
        rows.append([_cell(_text(cell)) for cell in cells])
    yield "<h2>All figures</h2><details><summary>Show the table</summary>"
    yield _table(head, rows)
    yield "</details>"


def _unit(metric: str) -> str:
    """Return the unit of a metric.

    >>> _unit("throughput_mbit_s"), _unit("connect_us")
    ('Mbit/s', 'µs')
    """
    suffix = max((each for each in _UNITS if metric.endswith(f"_{each}")), key=len)
    return _UNITS[suffix]


def _cell(content: str, style: str = "") -> str:
    return f'<td style="{style}">{content}</td>' if style else f"<td>{content}</td>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _text(value: Any) -> str:
    return html.escape(str(value))
