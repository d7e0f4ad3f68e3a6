"""Tests whose requirements a machine lacks: they are skipped, but fail in CI, which must run all of them."""

import importlib
import os
import shutil
from typing import Any, NoReturn

import pytest


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test; in CI (environment variable CI), fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def need(program: str, package: str = "") -> None:
    """Skip the test if the program is not in PATH; in CI, fail it. `package`: if its name is another one."""
    if shutil.which(program) is None:
        skip_or_fail(f"no program {program}: apt-get install {package or program}")


def optional_module(name: str, package: str) -> Any:
    """Import a module that needs an optional package. Without the package, the calling test file is skipped;
    in CI, its collection fails."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"no Python package {package}: make setup", exc_type=ImportError)
