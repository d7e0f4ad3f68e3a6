"""Prints the line and branch coverage of each package, from the JSON report of coverage.py:

python -m tests.support.coverage_totals build/coverage/report.json
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DEPTH = 2
"""How many folders below `ebpfproxy` have a line of their own."""


def package_of(file: str) -> str:
    """The package whose line includes the file.

    >>> package_of("ebpfproxy/backends/ebpf/services/table.py")
    'ebpfproxy/backends/ebpf'
    >>> package_of("ebpfproxy/log.py")
    'ebpfproxy'
    """
    return "/".join(file.split("/")[:-1][: _DEPTH + 1])


def table(report: Mapping[str, Any]) -> str:
    """The last line is the total.

    >>> numbers = {"num_statements": 4, "covered_lines": 3, "num_branches": 0, "covered_branches": 0}
    >>> print(table({"files": {"ebpfproxy/log.py": {"summary": numbers}}, "totals": numbers}))
    package                            lines covered        branches covered
    ebpfproxy                              4  75.0 %               0 100.0 %
    total                                  4  75.0 %               0 100.0 %
    """
    sums: dict[str, Counter[str]] = {}
    for file, numbers in report["files"].items():
        sums.setdefault(package_of(file), Counter()).update(_counts(numbers["summary"]))
    rows = [*sorted(sums.items()), ("total", _counts(report["totals"]))]
    head = f"{'package':30} {'lines':>9} covered {'branches':>15} covered"
    return "\n".join([head, *(_row(name, counts) for name, counts in rows)])


def _counts(numbers: Mapping[str, Any]) -> Counter[str]:
    return Counter({name: number for name, number in numbers.items() if isinstance(number, int)})


def _row(name: str, of: Mapping[str, int]) -> str:
    lines = _percent(of["covered_lines"], of["num_statements"])
    branches = _percent(of["covered_branches"], of["num_branches"])
    return f"{name:30} {of['num_statements']:9} {lines:>7} {of['num_branches']:15} {branches:>7}"


def _percent(part: int, of: int) -> str:
    return f"{100 * part / of if of else 100:.1f} %"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
