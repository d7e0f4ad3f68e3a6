"""Files of Debian packages that `make setup` extracts but does not install, since they would start services.

A file of the installed package is used if the package was not extracted.
"""

import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "debian"
"""The Makefile's variable EXTRACTED has the packages."""


def path(name: str) -> Path:
    """The file with this absolute path in its package. Skips the test if it is missing; in CI it fails."""
    for candidate in (FOLDER / name.lstrip("/"), Path(name)):
        if candidate.exists():
            return candidate
    outcome = pytest.fail if os.environ.get("CI") else pytest.skip
    outcome(f"no {name}: run make setup")
    raise AssertionError
