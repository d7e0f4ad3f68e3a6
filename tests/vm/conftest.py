"""The kernels of a test run.

A test with the fixture `kernel` runs once for each. Without `--kernels`, as in `make test-all`, this is
DEFAULT, and only tests marked `quick` run. `make test-vm` passes `--kernels=all`.

In software emulation these tests take minutes. There `make test`, which passes `--sample`, skips them.
"""

import pytest

from ebpfproxy.backends.ebpf.programs import object_file
from tests.support import missing
from tests.support.left_out import leave_out
from tests.vm.acceleration import why_no_device, why_not_kvm
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
    if not config.getoption("kernels"):
        leave_out(config, items, "test-vm", _is_long)


def _is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("vm") is not None and item.get_closest_marker("quick") is None


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """A kernel that is in the cache now. If it is not available, the test is skipped as without qemu."""
    wanted: Kernel = request.param
    only_with_kvm = request.config.getoption("sample") and not request.config.getoption("kernels")
    if only_with_kvm:
        _leave_to_test_all(why_no_device())  # before a kernel is fetched
    try:
        found = installed(wanted)
        why_not = why_not_kvm(found) if only_with_kvm else ""
    except Unavailable as lack:
        missing.skip_or_fail(f"vm level: {lack}")
    _leave_to_test_all(why_not)
    object_file()  # the VM reads it from the machine's file system; in software emulation clang takes minutes
    return wanted


def _leave_to_test_all(why: str) -> None:
    """This is no failure in CI: `make test` does not require KVM."""
    if why:
        pytest.skip(f"software emulation: make test-all ({why})")
