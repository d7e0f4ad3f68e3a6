"""Writes the outcomes of several runs into a page:

python -m tests.cluster.table docs/clusters.md build/cluster/*.json
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from tests.cluster.e2e import Outcome
from tests.cluster.proxy import MODES

BEGIN = "<!-- written by python -m tests.cluster.table -->"
END = "<!-- end -->"


def written(outcomes: Iterable[Outcome]) -> str:
    """A row for each cluster with the numbers of each mode, then the failed tests."""
    rows: dict[tuple[str, str, str], dict[str, Outcome]] = {}
    for each in sorted(outcomes, key=_order):
        rows.setdefault((each.kubernetes, each.network, each.machine), {})[each.mode] = each
    modes = "".join(f" `{mode}` |" for mode in MODES)
    lines = [f"| Kubernetes | network plugin | machine |{modes}", "|---" * (len(MODES) + 3) + "|"]
    for key, by_mode in rows.items():
        lines.append(f"| {' | '.join(key)} |{''.join(f' {_cell(by_mode, mode)} |' for mode in MODES)}")
    failures = [
        f"- {kubernetes}, {network}, {machine}, mode `{mode}`: {name}"
        for (kubernetes, network, machine), by_mode in rows.items()
        for mode, each in by_mode.items()
        for name in each.failed
    ]
    return "\n".join([*lines, *(["", "Failed:", "", *failures] if failures else [])])


def _order(outcome: Outcome) -> tuple[list[int], str, str]:
    version = [int(part) for part in outcome.kubernetes.lstrip("v").partition("-")[0].split(".")]
    return [-part for part in version], outcome.network, outcome.machine


def _cell(by_mode: Mapping[str, Outcome], mode: str) -> str:
    found = by_mode.get(mode)
    return f"{found.passed} / {len(found.failed)} / {found.skipped}" if found else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.table", description="write a page")
    parser.add_argument("page", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="files of python -m tests.cluster")
    given = parser.parse_args()
    page: Path = given.page
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        parser.error(f"{page} has no place for the table: {BEGIN} {END}")
    outcomes = [
        each for path in given.results for each in msgspec.json.decode(path.read_bytes(), type=list[Outcome])
    ]
    page.write_text(f"{head}{BEGIN}\n\n{written(outcomes)}\n\n{END}{tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
