"""The kernels of a test run.

A test with the fixture `kernel` runs once for each. Without `--kernels`, as in `make test`, this is DEFAULT,
and only tests marked `quick` run. `make test-vm` passes `--kernels=all`.
"""

import os

import pytest

from ebpfproxy.backends.ebpf.programs import object_file
from tests.vm.cache import Unavailable
from tests.vm.debian import installed
from tests.vm.kernels import Kernel, kernels

DEFAULT = "6.1"
"""This kernel has IPVS, dummy devices and SCTP as modules, and rejects programs that later ones accept."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" in metafunc.fixturenames:
        table = kernels()
        wanted = metafunc.config.getoption("kernels") or DEFAULT
        names = list(table) if wanted == "all" else wanted.split(",")
        metafunc.parametrize("kernel", [table[name] for name in names], ids=names, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("kernels"):
        return
    long = [each for each in items if each.get_closest_marker("vm") and not each.get_closest_marker("quick")]
    items[:] = [each for each in items if each not in long]
    config.hook.pytest_deselected(items=long)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """A kernel that is in the cache now. If it is not available, the test is skipped as without qemu."""
    wanted: Kernel = request.param
    try:
        installed(wanted)
    except Unavailable as lack:
        outcome = pytest.fail if os.environ.get("CI") else pytest.skip
        outcome(f"vm level: {lack}")
    object_file()  # the VM reads it from the machine's file system; clang takes minutes in a VM
    return wanted
