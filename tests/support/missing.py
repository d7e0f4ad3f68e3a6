"""Tests whose requirements a machine lacks: they are skipped, but fail in CI, which must run all of them."""

import os
import shutil
from typing import NoReturn

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
