"""The classifiers, compiled once. Each test begins without Services and flows."""

from collections.abc import Iterator

import pytest

from tests.support.bpf_place import bpf_place
from tests.support.packet_path import PacketPath, packet_path


@pytest.fixture(scope="package")
def _path() -> Iterator[PacketPath]:
    with bpf_place() as place, packet_path(place) as made:
        yield made


@pytest.fixture
def path(_path: PacketPath) -> PacketPath:
    _path.start_over()
    return _path
