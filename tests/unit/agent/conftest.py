import pytest

from tests.unit.agent.agent import Agent


@pytest.fixture
def agent() -> Agent:
    return Agent()
