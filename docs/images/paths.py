"""The diagram of the README: writes paths-light.svg and paths-dark.svg beside this file.

Run it after a change: `make docs-generate`. A test fails if the files are out of date.
"""

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 760, 330
BOX_HEIGHT = 46


class Theme(NamedTuple):
    text: str
    muted: str
    line: str
    user: str
    kernel: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#59636e", "#ddf4ff", "#fff8c5"),
    "dark": Theme("#f0f6fc", "#9198a1", "#9198a1", "#0c2d6b", "#4b2900"),
}


class Box(NamedTuple):
    """Center and width in pixels; `kernel`: a BPF program or map of ebpfproxy."""

    x: int
    y: int
    width: int
    first: str
    second: str = ""
    kernel: bool = False


class Arrow(NamedTuple):
    x1: int
    y1: int
    x2: int
    y2: int
    label: str = ""
    both: bool = False


def svg(theme: Theme) -> str:
    boxes = {
        "api": Box(100, 36, 160, "API server", "Services, EndpointSlices"),
        "agent": Box(380, 36, 200, "ebpfproxy agent", "Python control plane"),
        "inside": Box(100, 128, 160, "process or pod", "on this node"),
        "hook": Box(380, 128, 200, "connect() hook", "chooses an endpoint once", kernel=True),
        "maps": Box(380, 210, 200, "BPF maps", "frontends, endpoints, flows", kernel=True),
        "outside": Box(100, 292, 160, "client outside", "NodePort, load balancer IP"),
        "tc": Box(380, 292, 200, "tc ingress and egress", "DNAT, masquerade, replies", kernel=True),
        "socket": Box(665, 128, 150, "endpoint", "on any node"),
        "packet": Box(665, 292, 150, "endpoint", "on any node"),
    }
    arrows = (
        Arrow(180, 36, 280, 36, "watch"),
        Arrow(480, 128, 590, 128, "direct", both=True),
        Arrow(180, 128, 280, 128),
        Arrow(180, 292, 280, 292, both=True),
        Arrow(480, 292, 590, 292, "each packet", both=True),
        Arrow(380, 233, 380, 269),
        Arrow(380, 187, 380, 151),
    )
    elbow = "M 480 36 H 500 V 210 H 484"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" text-anchor="middle" role="img">',
        "<title>Paths of a connection in mode ebpf</title>",
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" refY="4" '
        f'orient="auto-start-reverse"><path d="M 0 0 L 8 4 L 0 8 z" fill="{theme.line}"/></marker></defs>',
    ]
    lines += [_arrow(each, theme) for each in arrows]
    lines.append(
        f'<path d="{elbow}" fill="none" stroke="{theme.line}" stroke-width="1.5" marker-end="url(#end)"/>'
    )
    lines.append(_text(524, 84, "writes", theme.muted, 12))
    lines += [_box(each, theme) for each in boxes.values()]
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _arrow(arrow: Arrow, theme: Theme) -> str:
    start = ' marker-start="url(#end)"' if arrow.both else ""
    line = (
        f'<line x1="{arrow.x1}" y1="{arrow.y1}" x2="{arrow.x2}" y2="{arrow.y2}" stroke="{theme.line}" '
        f'stroke-width="1.5" marker-end="url(#end)"{start}/>'
    )
    if not arrow.label:
        return line
    return line + _text((arrow.x1 + arrow.x2) // 2, arrow.y1 - 8, arrow.label, theme.muted, 12)


def _box(box: Box, theme: Theme) -> str:
    left, top = box.x - box.width // 2, box.y - BOX_HEIGHT // 2
    fill = theme.kernel if box.kernel else theme.user
    return (
        f'<rect x="{left}" y="{top}" width="{box.width}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" '
        f'stroke="{theme.line}"/>'
        + _text(box.x, box.y - 3, box.first, theme.text, 14)
        + _text(box.x, box.y + 14, box.second, theme.muted, 11)
    )


def _text(x: int, y: int, text: str, color: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}">{text}</text>'


def files() -> dict[Path, str]:
    """The text of each file, by path."""
    return {FOLDER / f"paths-{name}.svg": svg(theme) for name, theme in THEMES.items()}
