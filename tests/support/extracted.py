"""Files of Debian packages that `make setup` extracts but does not install: they would start services."""

import sys
from pathlib import Path

from tests.support.missing import skip_or_fail

FOLDER = Path(sys.prefix) / "debian"
"""The Makefile's variable EXTRACTED has the packages."""


def path(name: str) -> Path:
    """The file with this absolute path in its package. Skips the test if it is missing; in CI it fails."""
    found = FOLDER / name.lstrip("/")
    if not found.exists():
        skip_or_fail(f"no {found}: run make setup")
    return found
