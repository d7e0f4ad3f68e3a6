"""The table of kernels, `kernels.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    config: Path | None = None
    """The configuration with which the package's source is built for user mode; None for a VM's kernel."""


def kernels() -> dict[str, Kernel]:
    """By name, in the table's order."""
    table = tomllib.loads(TABLE.read_text())
    every = table["every"]
    return {name: _kernel(name, fields, every) for name, fields in table["kernels"].items()}


def _kernel(name: str, fields: Mapping[str, Any], every: Mapping[str, Any]) -> Kernel:
    config = TABLE.with_name(fields["config"]) if "config" in fields else None
    return Kernel(
        name,
        fields["suite"],
        fields["package"],
        fields["lacks"],
        every["skips"] + fields.get("skips", []),
        every["cannot"] | fields.get("cannot", {}),
        config,
    )
