"""Relayed datagrams, with real sockets and relay processes."""

import socket

import pytest

from ebpfproxy.backends.userspace.entries import UserspaceSettings
from ebpfproxy.backends.userspace.messages import Event
from ebpfproxy.model.address import Protocol
from tests.kernel.cluster import eventually
from tests.kernel.userspace_relay.conftest import ADDRESS, PORT, Place, plan

pytestmark = pytest.mark.kernel

PATIENT = UserspaceSettings(relays=2, udp_timeout=0.1, udp_unreplied_timeout=3600.0)
IMPATIENT = UserspaceSettings(relays=2, udp_timeout=0.1, udp_unreplied_timeout=0.1)
FEW = UserspaceSettings(relays=1, udp_timeout=60.0, udp_flows=10)


def client() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(10.0)
    return sock


def asked(sock: socket.socket, server: socket.socket, text: bytes = b"?") -> tuple[str, int]:
    """Send a datagram to the Service, answer it, and return the address from which it arrived."""
    sock.sendto(text, (ADDRESS, PORT))
    content, relay = server.recvfrom(1 << 16)
    assert content == text
    server.sendto(content + b"!", relay)
    reply, frontend = sock.recvfrom(1 << 16)
    assert (reply, frontend) == (text + b"!", (ADDRESS, PORT))
    return relay[0], relay[1]


def open_flows(place: Place) -> int:
    return place.backend.relays.counters().udp_flows


def test_replies_come_from_the_frontend_and_a_flow_keeps_its_socket(place: Place) -> None:
    server = place.udp()
    place.serve(plan(server.getsockname(), protocol=Protocol.UDP))
    with client() as one, client() as other:
        first = asked(one, server)
        assert asked(one, server, b"") == first
        assert asked(one, server, bytes(60000)) == first
        assert asked(other, server) != first
    assert open_flows(place) == 2


@pytest.mark.parametrize("settings", [PATIENT])
def test_a_replied_flow_ends_before_one_that_waits_for_a_reply(place: Place) -> None:
    server = place.udp()
    place.serve(plan(server.getsockname(), protocol=Protocol.UDP))
    with client() as waiting, client() as other:
        waiting.sendto(b"unreplied", (ADDRESS, PORT))
        relay = server.recvfrom(100)[1]
        asked(other, server)
        eventually(lambda: open_flows(place) == 1, "the replied flow ends")
        assert asked(waiting, server) == relay
        eventually(lambda: open_flows(place) == 0, "both have a reply and end")


@pytest.mark.parametrize("settings", [IMPATIENT])
def test_a_flow_without_a_reply_ends_after_its_own_timeout(place: Place) -> None:
    server = place.udp()
    place.serve(plan(server.getsockname(), protocol=Protocol.UDP))
    with client() as sock:
        sock.sendto(b"unreplied", (ADDRESS, PORT))
        server.recvfrom(100)
        eventually(lambda: open_flows(place) == 0, "the flow ends")
        assert place.backend.report().events[Event.FLOWS] == 1


@pytest.mark.parametrize("settings", [FEW])
def test_too_many_flows_end_the_least_recently_active_ones(place: Place) -> None:
    server = place.udp()
    place.serve(plan(server.getsockname(), protocol=Protocol.UDP))
    socks = [client() for _ in range(25)]
    first = asked(socks[0], server)
    for sock in socks[1:]:
        asked(sock, server)
        assert asked(socks[0], server) == first  # it stays, since it is active
    assert open_flows(place) == 10
    assert place.backend.report().events[Event.FLOWS_EVICTED] == 15
    for sock in socks:
        sock.close()


def test_a_flow_leaves_a_removed_endpoint_and_one_that_rejects_datagrams(place: Place) -> None:
    server, other = place.udp("127.0.0.2"), place.udp("127.0.0.3")
    place.serve(plan(server.getsockname(), protocol=Protocol.UDP))
    with client() as sock:
        asked(sock, server)
        place.serve(plan(other.getsockname(), protocol=Protocol.UDP))
        asked(sock, other)
        last = place.udp("127.0.0.4")
        place.serve(plan(other.getsockname(), last.getsockname(), protocol=Protocol.UDP))
        other.close()

        def arrives() -> bool:
            """The datagram that is rejected first is lost."""
            sock.sendto(b"again", (ADDRESS, PORT))
            last.settimeout(0.2)
            try:
                return last.recv(100) == b"again"
            except TimeoutError:
                return False

        eventually(arrives, "the flow moves to the other endpoint")
