"""The table of situations in docs/node-situations.md: `python -m tests.kernel.zoo.page` prints it."""

import inspect
import re

from tests.kernel.zoo.known_failures import KNOWN_FAILURES
from tests.kernel.zoo.situations import SITUATIONS

MODES = {"ebpf": ("ebpf", "ebpf-off"), "nftables": ("nftables",), "iptables": ("iptables",)}
MODES |= {"ipvs": ("ipvs",), "userspace": ("userspace",)}
"""By mode: the configurations of the agent in that mode."""
_REPORT = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")


def rows() -> list[str]:
    """The rows of the table, in the order of `SITUATIONS`, after a header."""
    lines = ["| situation | what is special | differs in | source |", "|---|---|---|---|"]
    for name, situation in SITUATIONS.items():
        special, source = (" ".join(text.split()) for text in (inspect.getdoc(situation) or "").split("\n\n"))
        results = {mode: _differing(name, ways) for mode, ways in MODES.items()}
        differing = "; ".join(f"`{mode}`: {flows}" for mode, flows in results.items() if flows)
        link = _REPORT.sub(r"[\1#\2](https://github.com/\1/issues/\2)", source)
        lines.append(f"| `{name}` | {special} | {differing} | {link} |")
    return lines


def _differing(name: str, ways: tuple[str, ...]) -> str:
    """The clients and frontends whose results differ from the expected ones; empty if all are equal."""
    failing = {
        " ".join(row.flows.split()[:2]).replace("|", ", ").replace("*", "all")
        for row in KNOWN_FAILURES
        if name in row.situations and set(ways) & set(row.ways)
    }
    return " and ".join(sorted(failing))


if __name__ == "__main__":
    print("\n".join(rows()))
