"""sock_diag with real sockets, in network namespaces of the test."""

import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import NotFound, Unsupported
from ebpfproxy.linux.netns import namespaces, netns
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.model.address import Address, Protocol, parse_address
from tests.kernel.loopback import add_addresses

pytestmark = pytest.mark.kernel

SO_COOKIE = 57
V4, V6 = "10.255.77.1", "fd00:77::1"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def pod() -> Iterator[int]:
    """The descriptor of a network namespace with an address of each family."""
    name = f"ebpfproxy-test-{os.getpid()}-sockets"
    ip("netns", "add", name)
    try:
        with netns.entered(netns.path(name)):
            add_addresses(V4, V6)
        with open(f"/run/netns/{name}", "rb") as opened:
            yield opened.fileno()
    finally:
        ip("netns", "del", name)


def cookie(sock: socket.socket) -> int:
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)


@contextlib.contextmanager
def connected(peer: str, port: int, family: int = socket.AF_INET) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        sock.connect((peer, port))
        yield sock


def destination(peer: str, port: int) -> tuple[Address, int]:
    return parse_address(peer), port


def test_a_connected_socket_is_listed_with_the_cookie_of_getsockopt(pod: int) -> None:
    with namespaces.in_namespace(pod), connected(V4, 5353) as client:
        (found,) = sockets.connected_udp()
        assert found == sockets.DiagSocket(
            family=socket.AF_INET,
            protocol=Protocol.UDP,
            source=parse_address(V4),
            source_port=client.getsockname()[1],
            destination=parse_address(V4),
            destination_port=5353,
            cookie=cookie(client),
            interface=0,
            state=sockets.State.ESTABLISHED,
            inode=os.fstat(client.fileno()).st_ino,
        )


def test_sockets_of_both_families_and_v4_mapped_ones_are_listed(pod: int) -> None:
    with (
        namespaces.in_namespace(pod),
        connected(V4, 1) as four,
        connected(V6, 2, socket.AF_INET6) as six,
        connected(f"::ffff:{V4}", 3, socket.AF_INET6) as mapped,
    ):
        found = {
            (one.family, one.destination, one.destination_port, one.cookie) for one in sockets.connected_udp()
        }
        assert found == {
            (socket.AF_INET, parse_address(V4), 1, cookie(four)),
            (socket.AF_INET6, parse_address(V6), 2, cookie(six)),
            (socket.AF_INET6, parse_address(V4), 3, cookie(mapped)),
        }


def test_a_socket_that_is_only_bound_is_not_listed(pod: int) -> None:
    with namespaces.in_namespace(pod), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((V4, 0))
        assert list(sockets.connected_udp()) == []


def test_sockets_of_another_namespace_are_not_listed(pod: int) -> None:
    with connected("127.0.0.1", 9), namespaces.in_namespace(pod):
        assert list(sockets.connected_udp()) == []


@pytest.mark.parametrize("limit", [0, 100], ids=["filtered here", "filtered by the kernel"])
def test_only_sockets_to_one_of_the_destinations_are_listed(
    pod: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "KERNEL_FILTER_LIMIT", limit)
    wanted = {destination(V4, 53), destination(V6, 53), destination("10.255.77.9", 53)}
    with (
        namespaces.in_namespace(pod),
        connected(V4, 53) as four,
        connected(V6, 53, socket.AF_INET6) as six,
        connected(f"::ffff:{V4}", 53, socket.AF_INET6) as mapped,
        connected(V4, 54),
        connected(V6, 54, socket.AF_INET6),
    ):
        assert {one.cookie for one in sockets.connected_udp(wanted)} == {
            cookie(s) for s in (four, six, mapped)
        }
        assert [one.cookie for one in sockets.connected_udp({destination(V6, 53)})] == [cookie(six)]


def test_a_long_list_of_destinations_finds_the_same_sockets(pod: int) -> None:
    many = {destination(f"10.1.{number // 256}.{number % 256}", 53) for number in range(3000)}
    with namespaces.in_namespace(pod), connected(V4, 53) as client:
        assert list(sockets.connected_udp(many)) == []
        found = sockets.connected_udp(many | {destination(V4, 53)})
        assert [one.cookie for one in found] == [cookie(client)]


def test_more_sockets_than_one_datagram_holds_are_all_listed(pod: int) -> None:
    with namespaces.in_namespace(pod), contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connected(V4, 1024 + number)) for number in range(500)]
        assert {one.cookie for one in sockets.connected_udp()} == {cookie(one) for one in opened}


@pytest.mark.parametrize(
    ("family", "peer"),
    [(socket.AF_INET, V4), (socket.AF_INET6, V6), (socket.AF_INET6, f"::ffff:{V4}")],
    ids=["IPv4", "IPv6", "v4-mapped"],
)
def test_a_destroyed_socket_fails_once_and_can_connect_again(pod: int, family: int, peer: str) -> None:
    with namespaces.in_namespace(pod), connected(peer, 53, family) as client:
        (found,) = sockets.connected_udp({destination(peer, 53)})
        sockets.destroy(found)
        with pytest.raises(ConnectionAbortedError):
            client.recv(1)
        assert list(sockets.connected_udp()) == []
        client.connect((peer, 54))
        assert [one.destination_port for one in sockets.connected_udp()] == [54]


def test_destroying_a_closed_socket_raises_not_found(pod: int) -> None:
    with namespaces.in_namespace(pod):
        with connected(V4, 53):
            (found,) = sockets.connected_udp()
        with pytest.raises(NotFound):
            sockets.destroy(found)


def test_a_new_socket_with_the_same_addresses_is_not_destroyed(pod: int) -> None:
    with namespaces.in_namespace(pod):
        with connected(V4, 53) as client:
            (old,) = sockets.connected_udp()
            source = client.getsockname()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as successor:
            successor.bind(source)
            successor.connect((V4, 53))
            with pytest.raises(NotFound):
                sockets.destroy(old)
            assert [one.cookie for one in sockets.connected_udp()] == [cookie(successor)]


def test_without_the_capability_destroying_is_unsupported(pod: int) -> None:
    """In a child process that drops CAP_NET_ADMIN (12) by capset(2)."""
    with namespaces.in_namespace(pod), connected(V4, 53):
        (found,) = sockets.connected_udp()
        child = os.fork()
        if child == 0:
            code = 9
            try:
                _drop_capabilities()
                sockets.destroy(found)
            except Unsupported as error:
                code = 0 if "CAP_NET_ADMIN" in error.hint else 8
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(list(sockets.connected_udp())) == 1


def _drop_capabilities() -> None:
    import ctypes

    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    assert ctypes.CDLL(None).capset(header, bytes(24)) == 0


def test_tcp_sockets_are_listed_by_state(pod: int) -> None:
    with namespaces.in_namespace(pod), socket.create_server((V4, 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection((V4, port), timeout=5) as client:
            accepted, _ = server.accept()
            with accepted:
                (listening,) = sockets.tcp([sockets.State.LISTEN])
                assert (listening.cookie, listening.source_port) == (cookie(server), port)
                established = {one.cookie for one in sockets.tcp([sockets.State.ESTABLISHED])}
                assert established == {cookie(client), cookie(accepted)}
                both = list(sockets.tcp(sockets.State))
                assert {one.state for one in both} == {sockets.State.LISTEN, sockets.State.ESTABLISHED}


def test_a_tcp_connection_can_be_destroyed(pod: int) -> None:
    with (
        namespaces.in_namespace(pod),
        socket.create_server((V4, 0)) as server,
        socket.create_connection((V4, server.getsockname()[1]), timeout=5) as client,
    ):
        established = sockets.tcp([sockets.State.ESTABLISHED])
        (own,) = (one for one in established if one.cookie == cookie(client))
        sockets.destroy(own)
        with pytest.raises(OSError) as caught:
            client.recv(1)
        assert caught.value.errno == errno.ECONNABORTED


def test_udp_sockets_in_every_namespace_are_found_and_destroyed(pod: int) -> None:
    """Regression, cilium/cilium#48096: NGINX's resolver socket sent to a DNS pod that was gone.

    The kernel's part: sockets in every namespace are found, the process of a destroyed socket gets an error,
    and a second search finds none.
    """
    backend = destination(V4, 53)
    with contextlib.ExitStack() as stack:
        with namespaces.in_namespace(pod):
            resolvers = [stack.enter_context(connected(V4, 53)) for _ in range(3)]
            other = stack.enter_context(connected(V4, 54))

        assert _destroyed_in_all_namespaces(backend) == {cookie(one) for one in resolvers}
        assert _destroyed_in_all_namespaces(backend) == set()
        for resolver in resolvers:
            with pytest.raises(ConnectionAbortedError):
                resolver.recv(1)
            with pytest.raises(OSError, match="Destination address required"):
                resolver.send(b"query")
            resolver.connect((V4, 5353))
        assert other.getpeername() == (V4, 54)


def _destroyed_in_all_namespaces(backend: tuple[Address, int]) -> set[int]:
    destroyed = set()
    with contextlib.closing(namespaces.opened_network_namespaces()) as opened:
        for descriptor in opened:
            with namespaces.in_namespace(descriptor):
                for found in sockets.connected_udp({backend}):
                    sockets.destroy(found)
                    destroyed.add(found.cookie)
    return destroyed
