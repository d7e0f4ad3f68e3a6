"""Maps of two sizes, made once, and for each test empty but for one Service."""

import contextlib
from collections.abc import Iterator

import pytest

from ebpfproxy.dataplanes.ebpf import abi
from tests.kernel.carry_over.layouts import DNS, FILLER, FORMER, PRESENT, Both, Layout, service
from tests.kernel.service_table.samples import endpoint, entry, frontend
from tests.support.bpf_place import BpfPlace, bpf_place, build_maps


@pytest.fixture(scope="package")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture(scope="package")
def built(place: BpfPlace) -> Iterator[Both]:
    version = f"v{abi.ABI_VERSION}"
    with contextlib.ExitStack() as stack:
        layouts = [
            Layout(build_maps(place, sizes, f"{version}-{name}"))
            for name, sizes in (("former", FORMER), ("present", PRESENT))
        ]
        for layout in layouts:
            stack.callback(layout.close)
        yield Both(*layouts)


@pytest.fixture
def both(built: Both) -> Both:
    """The same Service in both layouts, with other ids in each."""
    for layout in built:
        layout.empty()
    built.former.serve({FILLER: entry([frontend("10.96.0.9")], [endpoint("10.1.0.9"), endpoint("10.1.0.8")])})
    for layout in built:
        layout.serve({DNS: service("10.1.0.1", "10.1.0.2")})
    assert all(ours != theirs for ours, theirs in zip(built.former.ids(), built.present.ids(), strict=True))
    return built
