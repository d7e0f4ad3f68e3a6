"""The sizes of the maps, by the options and the memory of the node."""

import pytest

from ebpfproxy.backends.ebpf import maps
from ebpfproxy.backends.ebpf.maps import MapSizes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (0, (65536, 524288, 262144, 4096, 65536)),
        (GIB // 2, (65536, 524288, 262144, 4096, 65536)),
        (4 * GIB, (65536, 524288, 262144, 16384, 131072)),
        (24 * GIB, (262144, 1048576, 262144, 65536, 262144)),
        (1024 * GIB, (262144, 2097152, 1048576, 262144, 262144)),
    ],
)
def test_sizes_without_an_option_follow_the_memory(
    monkeypatch: pytest.MonkeyPatch, memory: int, expected: tuple[int, ...]
) -> None:
    monkeypatch.setattr(maps, "_memory", lambda: memory)
    sizes = MapSizes()
    assert (sizes.services, sizes.slots, sizes.endpoints, sizes.sockets, sizes.flows) == expected


def test_an_option_sets_a_size_whatever_the_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_memory", lambda: GIB)
    sizes = MapSizes(services=5, slots=7, endpoints=3, sockets=9)
    assert (sizes.services, sizes.slots, sizes.endpoints, sizes.sockets) == (5, 7, 3, 9)
    assert sizes.defines()["SLOT_PAIRS_MAX"] == "4"


def test_an_eighth_of_the_flows_but_at_least_4096_can_be_half_open() -> None:
    assert [MapSizes(flows=flows).half_open for flows in (16, 32768, 262144)] == [4096, 4096, 32768]
