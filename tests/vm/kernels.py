"""The table of kernels, `kernels.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("kernels.toml")


@dataclass(frozen=True, slots=True)
class Kernel:
    """See the head of the table."""

    name: str
    suite: str
    package: str
    """The package that depends on the kernel's package, whose name changes with each release."""
    lacks: list[str]
    skips: list[str]
    cannot: Mapping[str, str]
    """By the id of a test, or the beginning of an id: the reason."""


def kernels() -> dict[str, Kernel]:
    """By name, in the table's order."""
    table = tomllib.loads(TABLE.read_text())
    every = table["every"]["cannot"]
    return {
        name: Kernel(name, **{"skips": []} | fields | {"cannot": every | fields.get("cannot", {})})
        for name, fields in table["kernels"].items()
    }
