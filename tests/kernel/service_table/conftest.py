"""Maps of two sizes, created once, and emptied for each test."""

from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.services import shares
from tests.kernel.service_table.samples import (
    wipe,
)
from tests.support.bpf_place import BpfPlace, bpf_place, build_maps


@pytest.fixture(scope="session")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture(scope="session")
def roomy_maps(place: BpfPlace) -> Iterator[Maps]:
    maps = Maps(build_maps(place, MapSizes(128, 256, 128, 64, 16, 16, 64, traffic=128), "roomy"))
    yield maps
    maps.close()


@pytest.fixture(scope="session")
def tiny_maps(place: BpfPlace) -> Iterator[Maps]:
    maps = Maps(build_maps(place, MapSizes(8, 16, 16, 16, 16, 16, 6), "tiny"))
    yield maps
    maps.close()


@pytest.fixture
def roomy(roomy_maps: Maps) -> Maps:
    wipe(roomy_maps)
    return roomy_maps


@pytest.fixture
def tiny(tiny_maps: Maps, monkeypatch: pytest.MonkeyPatch) -> Maps:
    """Maps that one namespace may fill completely."""
    monkeypatch.setattr(shares, "is_within", lambda *_: True)
    wipe(tiny_maps)
    return tiny_maps
