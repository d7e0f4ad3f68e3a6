import pytest

from tests.unit.proxier.agent import Agent


@pytest.fixture
def agent() -> Agent:
    return Agent()
