"""Classic BPF programs of sockets, in a real kernel."""

import select
import socket
import time
from collections.abc import Iterator

import pytest

from ebpfproxy.linux.captured_packets import CapturedPackets
from ebpfproxy.linux.sockets import socket_filter
from ebpfproxy.linux.sockets.socket_filter import DROP, PASS, Program
from ebpfproxy.model.address import Family, parse_address, parse_network
from tests.kernel.loopback import add_addresses
from tests.support.namespace import namespace

pytestmark = pytest.mark.kernel

LOOPBACK = 1
V6 = ("fd00::1", "fd00:0:0:1::1", "fd00::1:0:0:1", "fd01::1", "fd00::2")


@pytest.fixture(autouse=True)
def _place() -> Iterator[None]:
    with namespace("filters") as made, made.entered():
        add_addresses(*V6)
        yield


def admitted(program: Program, *sources: str) -> set[str]:
    """The sources whose connections and datagrams pass the filter; both agree."""
    number = socket.AF_INET6 if ":" in sources[0] else socket.AF_INET
    own = "::1" if number == socket.AF_INET6 else "127.0.0.1"
    found: dict[int, set[str]] = {socket.SOCK_STREAM: set(), socket.SOCK_DGRAM: set()}
    for kind, passed in found.items():
        with socket.socket(number, kind) as server:
            server.bind((own, 0))
            server.settimeout(0.2)
            socket_filter.attach(server, program)
            if kind == socket.SOCK_STREAM:
                server.listen()
            for source in sources:
                with socket.socket(number, kind) as client:
                    client.settimeout(0.2)
                    client.bind((source, 0))
                    try:
                        client.connect(server.getsockname())
                        if kind == socket.SOCK_DGRAM:
                            client.send(b"?")
                            server.recv(1)
                        passed.add(source)
                    except TimeoutError:
                        pass
    assert found[socket.SOCK_STREAM] == found[socket.SOCK_DGRAM]
    return found[socket.SOCK_STREAM]


def test_packets_pass_by_their_source_network() -> None:
    only = [
        *socket_filter.from_networks([parse_network("127.0.0.8/30"), parse_network("127.1.0.0/16")], PASS)
    ]
    sources = "127.0.0.7", "127.0.0.8", "127.0.0.11", "127.0.0.12", "127.1.2.3", "127.2.2.3"
    assert admitted([*only, *DROP], *sources) == {"127.0.0.8", "127.0.0.11", "127.1.2.3"}


def test_networks_of_ipv6_are_compared_word_by_word() -> None:
    for text, expected in {
        "fd00::/64": {V6[0], V6[2], V6[4]},
        "fd00::/48": set(V6) - {V6[3]},
        "fd00::1/128": {V6[0]},
        "::/0": set(V6),
    }.items():
        program = [*socket_filter.from_network(parse_network(text), PASS), *DROP]
        assert admitted(program, *V6) == expected, text
        opposite = [*socket_filter.unless_from_network(parse_network(text), DROP), *PASS]
        assert admitted(opposite, *V6) == expected, text


def test_the_interface_decides() -> None:
    assert admitted([*socket_filter.on_interface(LOOPBACK, PASS), *DROP], "127.0.0.1") == {"127.0.0.1"}
    assert admitted([*socket_filter.on_interface(LOOPBACK + 1, PASS), *DROP], "127.0.0.1") == set()


@pytest.mark.parametrize(("address", "at"), [("127.0.0.3", 16), (V6[2], 24)])
def test_only_packets_to_one_address_are_captured(address: str, at: int) -> None:
    wanted = parse_address(address)
    with CapturedPackets("lo", wanted) as packets:
        for each in ("127.0.0.2", *V6, "127.0.0.4", address):
            number = socket.AF_INET6 if ":" in each else socket.AF_INET
            with socket.socket(number, socket.SOCK_DGRAM) as client:
                client.sendto(each.encode(), (each, 9))
        first = packets.next(time.monotonic() + 10.0)
        assert first
        assert wanted.endswith(first[at : at + (4 if at == 16 else 16)])
        assert first.endswith(address.encode())


@pytest.mark.parametrize("family", list(Family), ids=lambda each: each.value)
def test_all_connections_of_a_client_reach_the_same_socket(family: Family) -> None:
    """Of a group of three; different clients use all of them."""
    number, own = (socket.AF_INET, "127.0.0.1") if family is Family.IPV4 else (socket.AF_INET6, "::1")
    group: list[socket.socket] = []
    try:
        for _ in range(3):
            each = socket.socket(number, socket.SOCK_STREAM)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind((own, group[0].getsockname()[1] if group else 0))
            each.listen()
            socket_filter.attach_choice(each, socket_filter.by_source(family, 3))
            group.append(each)
        sources = [f"127.0.1.{n}" for n in range(12)] if family is Family.IPV4 else V6
        reached = {source: {_reached(group, source) for _ in range(4)} for source in sources}
        assert {len(each) for each in reached.values()} == {1}
        assert len(set.union(*reached.values())) > 1
    finally:
        for each in group:
            each.close()


def _reached(group: list[socket.socket], source: str) -> int:
    """The number of the socket that accepts a connection."""
    address = group[0].getsockname()[:2]
    with socket.create_connection(address, 10.0, (source, 0)):
        (ready,), _, _ = select.select(group, [], [], 10.0)
        ready.accept()[0].close()
        return group.index(ready)
