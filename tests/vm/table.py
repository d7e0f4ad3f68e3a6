"""Measure every VM kernel of kernels.toml, and write the tables of docs/kernels.md:

python -m tests.vm.table docs/kernels.md
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.vm.cache import Unavailable
from tests.vm.debian import installed
from tests.vm.kernels import Kernel, kernels
from tests.vm.level import answer_of

BEGIN = "<!-- written by python -m tests.vm.table -->"
END = "<!-- end -->"
Costs = Mapping[str, Mapping[str, Any]]
"""The costs by tests.vm.programs, by the program's name."""


def written(costs: Mapping[str, Costs], features: Mapping[str, Mapping[str, Any]]) -> str:
    """The text between BEGIN and END. Both arguments are by the kernel's release."""
    parts = [
        _table("missing features of mode `ebpf`", features, _lacking),
        _programs("Instructions that the verifier processed (limit: 1,000,000):", costs, _verified),
    ]
    return "\n\n".join(parts)


def _lacking(found: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in found["missing"]["ebpf"]) or "nothing"


def _verified(cost: Mapping[str, Any]) -> str:
    return "rejected" if cost["rejection"] else f"{cost['verified']:,}"


def _table(title: str, rows: Mapping[str, Mapping[str, Any]], cell: Any) -> str:
    lines = [f"| kernel | mode that `auto` selects | {title} |", "|---|---|---|"]
    lines += [f"| {release} | `{found['mode']}` | {cell(found)} |" for release, found in rows.items()]
    return "\n".join(lines)


def _programs(title: str, costs: Mapping[str, Costs], cell: Any) -> str:
    releases = list(costs)
    lines = [title, "", f"| program | {' | '.join(releases)} |", "|---" * (len(releases) + 1) + "|"]
    for name in costs[releases[0]]:
        lines.append(f"| `{name}` | {' | '.join(cell(costs[each][name]) for each in releases)} |")
    return "\n".join(lines)


def _measured(wanted: Sequence[Kernel]) -> str:
    costs: dict[str, Costs] = {}
    features: dict[str, Mapping[str, Any]] = {}
    for kernel in wanted:
        release = installed(kernel).release
        for module, into in (("programs", costs), ("features", features)):
            with tempfile.TemporaryDirectory(prefix="ebpfproxy-vm-") as scratch:
                answer = answer_of(kernel, f"tests.vm.{module}", Path(scratch))
            into[release] = {each["name"]: each for each in answer} if isinstance(answer, list) else answer
    return written(costs, features)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm.table", description="measure, and write a page")
    parser.add_argument("page", type=Path)
    page: Path = parser.parse_args().page
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        parser.error(f"{page} has no place for the tables: {BEGIN} {END}")
    try:
        # Without a JIT and without emulation, the user-mode kernel's figures are not comparable.
        text = _measured([kernel for kernel in kernels().values() if kernel.config is None])
    except Unavailable as lack:
        print(lack, file=sys.stderr)
        return 2
    page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
