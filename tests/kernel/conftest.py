"""The clusters that the kernel's tests share: a lab takes a second, an agent's first start two.

A test that asks for `cluster` runs once for each dataplane; `@pytest.mark.dataplanes("ebpf")` names those
that a test is about, where it is not about all.
"""

import contextlib
from collections.abc import Iterator

import pytest

from ebpfproxy.bench.load import Load
from ebpfproxy.lab import Lab
from tests.kernel.cluster import Cluster

DATAPLANES = ("ebpf",)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "dataplanes(*names): which dataplanes a test is about; default: all")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cluster" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("dataplanes")
        wanted = mark.args if mark else DATAPLANES
        metafunc.parametrize("cluster", wanted, indirect=True, scope="session")


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One node with a running agent for all tests; each has Services of its own."""
    with Lab("test-shared", 1) as lab:
        shared = Cluster(lab, request.param)
        shared.start("--sync-period=2s")
        try:
            yield shared
        finally:
            shared.end()


@pytest.fixture(scope="module")
def _rough() -> Iterator[Cluster]:
    with Lab("test-rough", 2) as lab:
        yield Cluster(lab)


@pytest.fixture
def rough(_rough: Cluster) -> Iterator[Cluster]:
    """A node for tests that start and end the agent; what an earlier one left pinned is still there."""
    try:
        yield _rough
    finally:
        with contextlib.suppress(ProcessLookupError):
            _rough.end()
        _rough.forget()


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    return Load(tmp_path_factory.mktemp("load"))
