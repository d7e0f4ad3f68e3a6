"""The colors of charts in light and dark mode.

Charts are drawn with placeholders, which are replaced: by CSS variables in a page, so that it follows the
reader's color scheme, or by the colors of one scheme in a file of its own.
"""

from collections.abc import Mapping, Sequence

SCHEMES = ("light", "dark")

_BASE = {
    "text": ("#1f2328", "#f0f6fc"),
    "muted": ("#59636e", "#9198a1"),
    "grid": ("#d1d9e0", "#3d444d"),
    "page": ("#ffffff", "#0d1117"),
}

_MODES = {
    "none": ("#6e7781", "#9198a1"),
    "ebpf": ("#0969da", "#58a6ff"),
    "nftables": ("#1a7f37", "#3fb950"),
    "iptables": ("#bc4c00", "#f0883e"),
    "ipvs": ("#8250df", "#bc8cff"),
    "kube-proxy-nftables": ("#0e7490", "#22d3ee"),
    "kube-proxy-iptables": ("#cf222e", "#ff7b72"),
    "kube-proxy-ipvs": ("#bf3989", "#f778ba"),
}
_OTHERS = (("#9a6700", "#e3b341"), ("#a0439c", "#e599e0"), ("#0550ae", "#a5d6ff"), ("#622cbc", "#d2a8ff"))
"""The colors of variants of modes, in order of use."""


def pairs(modes: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the light and the dark color by name: those of a page, and those of each mode.

    >>> pairs(["ebpf-host"])["ebpf-host"] == _OTHERS[0]
    True
    """
    others = [mode for mode in modes if mode not in _MODES]
    return {
        **_BASE,
        **{mode: _MODES[mode] for mode in modes if mode in _MODES},
        **{mode: _OTHERS[at % len(_OTHERS)] for at, mode in enumerate(others)},
    }


def placeholders(modes: Sequence[str]) -> dict[str, str]:
    """Return a color by name that no chart has otherwise."""
    return {name: f"#0a0b{number:02x}" for number, name in enumerate(pairs(modes), 0x10)}


def variable(name: str) -> str:
    """Return the name of the CSS variable of a color."""
    return f"--chart-{name}"


def with_variables(svg: str, modes: Sequence[str]) -> str:
    """Replace the placeholders of a chart by CSS variables."""
    return _replaced(svg, modes, {name: f"var({variable(name)})" for name in pairs(modes)})


def with_scheme(svg: str, modes: Sequence[str], scheme: str) -> str:
    """Replace the placeholders of a chart by the colors of one of SCHEMES."""
    at = SCHEMES.index(scheme)
    return _replaced(svg, modes, {name: colors[at] for name, colors in pairs(modes).items()})


def _replaced(svg: str, modes: Sequence[str], colors: Mapping[str, str]) -> str:
    for name, placeholder in placeholders(modes).items():
        svg = svg.replace(placeholder, colors[name])
    return svg


def css(modes: Sequence[str]) -> str:
    """Return the definitions of the CSS variables, for both color schemes."""
    light, dark = (
        " ".join(f"{variable(name)}: {colors[at]};" for name, colors in pairs(modes).items()) for at in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
