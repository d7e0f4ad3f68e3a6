"""The Geneve device in a separate namespace, beside devices and sockets of other programs."""

import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import AlreadyExists, Unsupported
from ebpfproxy.linux.netlink import geneve
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

PORT = 6099


@pytest.fixture
def node() -> Iterator[Namespace]:
    with namespace("geneve") as made, made.entered():
        try:
            assert geneve.ensure(PORT)
        except Unsupported as unsupported:
            pytest.skip(unsupported.message)
        geneve.remove()
        yield made


def test_the_device_has_the_requested_number_unless_it_is_taken(node: Namespace) -> None:
    assert geneve.ensure(PORT, 77) == geneve.ensure(PORT, 78) == geneve.find(PORT) == 77
    assert geneve.find(PORT + 1) == 0
    assert geneve.ensure(PORT + 1, 78) == 78
    assert geneve.remove()
    node.ip("link add other index 77 type bridge")
    assert geneve.ensure(PORT, 77) not in (0, 77)


def test_a_port_that_is_in_use_is_named(node: Namespace) -> None:
    message = f"cannot create the device {geneve.DEVICE}: UDP port {PORT} is in use"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("", PORT))
        with pytest.raises(AlreadyExists, match=message):
            geneve.ensure(PORT)
    geneve.remove()
    node.ip(f"link add other type geneve external dstport {PORT}")
    with pytest.raises(AlreadyExists, match=message):
        geneve.ensure(PORT)


def test_a_device_of_another_kind_stays(node: Namespace) -> None:
    node.ip(f"link add {geneve.DEVICE} type bridge")
    with pytest.raises(AlreadyExists, match="another program's, of kind bridge"):
        geneve.ensure(PORT)
    assert not geneve.remove()
    node.ip(f"link show {geneve.DEVICE}")
