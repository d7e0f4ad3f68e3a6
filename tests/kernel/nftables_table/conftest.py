"""The nftables backend, in a separate network namespace for each test."""

from collections.abc import Iterator

import pytest

from ebpfproxy.backends.nftables.backend import NftablesBackend
from tests.support.clock import Clock
from tests.support.namespace import namespace


@pytest.fixture(autouse=True)
def _own_namespace() -> Iterator[None]:
    """The calling thread is in a separate network namespace."""
    with namespace("nftables") as made, made.entered():
        yield


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def plane(clock: Clock) -> Iterator[NftablesBackend]:
    made = NftablesBackend(clock=clock)
    made.open()
    yield made
    made.close()
