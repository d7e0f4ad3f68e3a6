"""The programs without the helpers that an older kernel lacks, loaded by this one.

Without a helper, other branches of the programs run, which the verifier has to accept as well.
Distributions take single helpers into older kernels, so any subset may occur.
"""

import itertools
from collections.abc import Collection

import pytest

from ebpfproxy.backends.ebpf import features
from ebpfproxy.backends.ebpf.maps import COMPILED_SIZES
from ebpfproxy.backends.ebpf.programs import available_hooks, object_file, specs, xdp_spec
from ebpfproxy.linux.bpf.loader import loaded
from ebpfproxy.linux.bpf.xdp import Mode

pytestmark = pytest.mark.kernel

OF_PACKETS = [probe.name for probe in (*features.PROBES, features.FIB_LOOKUP_SRC)]
SUBSETS = [
    subset for count in range(len(OF_PACKETS) + 1) for subset in itertools.combinations(OF_PACKETS, count)
]
USUAL = [subset for subset in SUBSETS if len(subset) in (0, 1, len(OF_PACKETS) - 1, len(OF_PACKETS))]
"""Nothing, each helper alone, all but one, and all: each pair of helpers occurs in all four combinations."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subset" in metafunc.fixturenames:
        chosen = SUBSETS if metafunc.config.getoption("--all-feature-subsets") else USUAL
        if metafunc.config.getoption("sample"):  # nothing, two single helpers, and all
            chosen = [subset for subset in chosen if len(subset) in (0, len(OF_PACKETS))] + chosen[1:3]
        metafunc.parametrize("subset", chosen, ids=lambda subset: "-".join(subset) or "nothing")


def load(absent: Collection[str]) -> None:
    """Load all programs without these of the helpers that this kernel has. Raises KernelError."""
    numbers = COMPILED_SIZES.numbers() | features.numbers(features.present() - set(absent))
    wanted = *specs(available_hooks()), xdp_spec(Mode.NATIVE)
    with loaded(object_file(), wanted, numbers):
        pass


def test_the_programs_load_without_a_subset_of_helpers(subset: tuple[str, ...]) -> None:
    load(subset)


@pytest.mark.parametrize("absent", [(), OF_PACKETS], ids=["alone", "with-all-others"])
@pytest.mark.parametrize("helper", features.CONNECT_PROBES, ids=lambda probe: probe.name)
def test_the_programs_load_without_a_helper_of_the_hooks(
    helper: features.Probe, absent: Collection[str]
) -> None:
    load({helper.name, *absent})
