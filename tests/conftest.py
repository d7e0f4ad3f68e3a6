"""Options of the test run, and hypothesis without deadlines: a busy machine is no failure."""

import hypothesis
import pytest

hypothesis.settings.register_profile("ebpfproxy", deadline=None)
hypothesis.settings.load_profile("ebpfproxy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="write the texts under tests/golden/cases anew instead of comparing them",
    )
