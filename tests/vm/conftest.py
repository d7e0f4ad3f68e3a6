"""The kernels of a test run.

A test with the fixture `kernel` runs once for each. Without `--kernels`, as in `make test`, this is DEFAULT,
and only tests marked `quick` run. `make test-vm` passes `--kernels=all`.
"""

import os

import pytest

from ebpfproxy.backends.ebpf import features
from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES
from ebpfproxy.backends.ebpf.probes import HELPERS
from ebpfproxy.backends.ebpf.programs import sources
from ebpfproxy.linux.bpf import compiler
from tests.vm.debian import Unavailable, installed
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
    _compile_for(wanted)
    return wanted


def _compile_for(kernel: Kernel) -> None:
    """Compile the programs for this kernel's features here, since clang takes minutes in a VM.

    The VM reads the object files from the machine's file system.
    """
    absent = {define for define, helper in HELPERS.items() if helper.name in kernel.lacks}
    present = {define: text for define, text in features.defines().items() if define not in absent}
    compiler.compiled(sources(), COMPILED_SIZES.defines() | present)
