"""The table of kernels, `kernels.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("kernels.toml")


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    suite: str
    """Debian's, that has the package."""
    package: str
    """One that depends on the kernel's own, whose name changes with each release."""


def kernels() -> dict[str, Kernel]:
    """By name, in the table's order."""
    table = tomllib.loads(TABLE.read_text())["kernels"]
    return {name: Kernel(name, **fields) for name, fields in table.items()}
