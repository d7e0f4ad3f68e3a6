"""The mutations of mutations.toml: small changes that break the proxy, each with the test that catches it."""

import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CATALOG = Path(__file__).with_name("mutations.toml")


class Mutation(NamedTuple):
    """`file` is relative to the checkout. `test`: arguments of pytest, the file first."""

    id: str
    file: str
    text: str
    replacement: str
    breaks: str
    test: str

    @property
    def test_arguments(self) -> list[str]:
        return shlex.split(self.test)

    def occurrences(self, root: Path) -> int:
        """How often the text is in the file of the checkout `root`."""
        return (root / self.file).read_text().count(self.text)

    def apply(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.text, self.replacement))


def mutations() -> list[Mutation]:
    return [Mutation(**entry) for entry in tomllib.loads(CATALOG.read_text())["mutation"]]
