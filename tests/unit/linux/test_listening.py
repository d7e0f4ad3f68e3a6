"""Real sockets of this process are among those that listen."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.linux.sockets import holders, listening
from ebpfproxy.model.address import Protocol, format_address

V4, V6 = socket.AF_INET, socket.AF_INET6
STREAM, DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM


@contextlib.contextmanager
def bound(family: int, kind: int, address: str, v6_only: int = 0) -> Iterator[socket.socket]:
    with socket.socket(family, kind) as sock:
        if family == V6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
        sock.bind((address, 0))
        if kind == STREAM:
            sock.listen()
        yield sock


def found(sock: socket.socket) -> set[str]:
    protocol = Protocol.TCP if sock.type == STREAM else Protocol.UDP
    known = listening.addresses(listening.read())
    return {format_address(each) for each in known.get((protocol, sock.getsockname()[1]), ())}


@pytest.mark.parametrize("kind", [STREAM, DATAGRAM])
@pytest.mark.parametrize(
    ("family", "address", "v6_only", "expected"),
    [
        (V4, "127.0.0.1", 0, {"127.0.0.1"}),
        (V4, "0.0.0.0", 0, {"0.0.0.0"}),
        (V6, "::1", 0, {"::1"}),
        (V6, "::", 1, {"::"}),
        (V6, "::", 0, {"::", "0.0.0.0"}),
        (V6, "::ffff:127.0.0.1", 0, {"127.0.0.1"}),
    ],
)
def test_the_addresses_of_a_socket(
    kind: int, family: int, address: str, v6_only: int, expected: set[str]
) -> None:
    with bound(family, kind, address, v6_only) as sock:
        assert found(sock) == expected


def test_connected_sockets_and_clients_without_a_port_do_not_count() -> None:
    with bound(V4, DATAGRAM, "127.0.0.1") as sock:
        sock.connect(("127.0.0.1", 9))
        assert found(sock) == set()
    with socket.socket(V4, STREAM) as client:
        client.bind(("127.0.0.1", 0))
        assert found(client) == set()


def test_sockets_are_excluded_by_the_process_that_holds_them() -> None:
    with bound(V4, STREAM, "127.0.0.1") as sock:
        port = sock.getsockname()[1]
        own = holders.sockets_of(os.getpid())
        assert (Protocol.TCP, port) in listening.addresses(listening.read())
        assert (Protocol.TCP, port) not in listening.addresses(listening.read(), own)
