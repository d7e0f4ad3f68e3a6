"""Relayed TCP connections, with real sockets and relay processes."""

import contextlib
import hashlib
import os
import resource
import select
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from ebpfproxy.backends.userspace.entries import Listen, UserspaceSettings
from ebpfproxy.backends.userspace.inspection import connections
from ebpfproxy.backends.userspace.messages import Event
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.balancing import PlannedBalancing
from tests.kernel.cluster import eventually
from tests.kernel.userspace_relay.conftest import ADDRESS, PORT, Place, plan

pytestmark = pytest.mark.kernel

MANY = 2000
_MIB = 1 << 20


def memory(place: Place) -> int:
    """The resident memory of all relays, in bytes."""
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in place.backend.relays.pids())
    return sum(pages) * resource.getpagesize()


def received(client: socket.socket) -> bytes:
    """Everything until the other side has sent everything."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def test_bytes_arrive_complete_and_in_order_in_both_directions(place: Place) -> None:
    place.serve(plan(place.echo()))
    payload = os.urandom(20 * _MIB)
    with place.connect() as client:

        def send() -> None:
            client.sendall(payload)
            client.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        digest = hashlib.sha256(received(client)).digest()
        sender.join()
    assert digest == hashlib.sha256(payload).digest()


def test_each_side_may_close_before_the_other_has_sent_everything(place: Place) -> None:
    """Half-close: the request ends, then comes the answer; and the other way round."""
    server = place.listen()
    place.serve(plan(server.getsockname()))
    with place.connect() as client:
        peer, _ = server.accept()
        client.sendall(b"request")
        client.shutdown(socket.SHUT_WR)
        assert received(peer) == b"request"
        peer.sendall(b"answer")
        peer.close()
        assert received(client) == b"answer"
    with place.connect() as client:
        peer, _ = server.accept()
        peer.sendall(b"greeting")
        peer.shutdown(socket.SHUT_WR)
        assert received(client) == b"greeting"
        client.sendall(b"later")
        client.close()
        assert received(peer) == b"later"
        peer.close()
    eventually(lambda: place.backend.relays.counters().connections == 0, "all connections end")


def test_a_reset_of_one_side_resets_the_other(place: Place) -> None:
    server = place.listen()
    place.serve(plan(server.getsockname()))
    with place.connect() as client:
        peer, _ = server.accept()
        client.sendall(b"?")
        assert peer.recv(1) == b"?"  # so the relay has both connections
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.close()
        with pytest.raises(ConnectionResetError):
            received(client)


def test_a_slow_reader_stops_the_sender_and_not_the_memory_of_the_relays(place: Place) -> None:
    """20 clients send until nothing is accepted any more. Then the endpoint reads everything."""
    server = place.listen()
    place.serve(plan(server.getsockname()))
    before = memory(place)
    pairs = []
    sent = 0
    for _ in range(20):
        client = place.connect()
        pairs.append((client, server.accept()[0]))
        client.setblocking(False)
        chunk = bytes(_MIB)
        while select.select([], [client], [], 0.3)[1]:
            with contextlib.suppress(BlockingIOError):
                sent += client.send(chunk)
    assert sent > 20 * _MIB  # the buffers of the kernel are full
    assert memory(place) - before < 8 * _MIB
    got = 0
    for client, peer in pairs:
        client.shutdown(socket.SHUT_WR)
        got += len(received(peer))
    assert got == sent


def test_thousands_of_connections_are_relayed_at_the_same_time(place: Place) -> None:
    """The relays take at most 8 KiB of memory for each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * MANY), hard))
    server = place.listen(backlog=MANY)
    place.serve(plan(server.getsockname()))
    before = memory(place)
    try:
        pairs = [(place.connect(), server.accept()[0]) for _ in range(MANY)]
        assert place.backend.relays.counters().connections == MANY
        assert memory(place) - before < MANY * 8192
        by_port = {peer: number for number, (_, peer) in enumerate(pairs)}
        for number, (client, _) in enumerate(pairs):
            client.sendall(b"%d\n" % number)
        answers = {peer.recv(100) for peer in by_port}
        assert answers == {b"%d\n" % number for number in range(MANY)}
        for client, peer in pairs:
            client.close()
            peer.close()
        eventually(lambda: place.backend.relays.counters().connections == 0, "all connections end")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_endpoint_that_does_not_accept_is_replaced_by_the_next_one(place: Place) -> None:
    good = place.named("127.0.0.9")
    closed = place.listen("127.0.0.8")
    at = closed.getsockname()
    closed.close()
    place.serve(plan(at, good))
    assert {place.answer() for _ in range(10)} == {"127.0.0.9"}
    assert place.backend.report().events[Event.RETRIED] > 0
    assert not place.backend.report().events.get(Event.FAILED, 0)


def test_without_an_accepting_endpoint_the_client_gets_a_reset(place: Place) -> None:
    closed = place.listen("127.0.0.8")
    at = closed.getsockname()
    closed.close()
    place.serve(plan(at))
    with pytest.raises(ConnectionResetError):  # of the connect, or later
        received(place.connect())


def test_round_robin_uses_each_endpoint_equally(place: Place) -> None:
    """Each relay has its own round robin, so that one endpoint may be ahead by one for each relay."""
    place.serve(plan(*(place.named(f"127.0.0.{n}") for n in (2, 3, 4))))
    answers = [place.answer() for _ in range(60)]
    counts = [answers.count(each) for each in set(answers)]
    assert len(counts) == 3
    assert max(counts) - min(counts) <= 2


def test_weights_give_an_endpoint_more_connections(place: Place) -> None:
    endpoints = place.named("127.0.0.2"), place.named("127.0.0.3")
    place.serve(plan(*endpoints, balancing=PlannedBalancing(weights=(3, 1))))
    answers = [place.answer() for _ in range(80)]
    assert abs(answers.count("127.0.0.2") - 60) <= 6


def test_source_hash_and_least_connections_select_endpoints(place: Place) -> None:
    endpoints = [place.named(f"127.0.0.{n}") for n in (2, 3, 4)]
    place.serve(plan(*endpoints, balancing=PlannedBalancing(Algorithm.SOURCE_HASH)))
    sources = [f"127.0.1.{n}" for n in range(1, 65)]  # with 12, one of 50 runs misses an endpoint
    first = [place.answer(each) for each in sources]
    assert [place.answer(each) for each in sources] == first
    assert len(set(first)) == 3


@pytest.mark.parametrize("settings", [UserspaceSettings(relays=1)])
def test_least_connections_counts_no_connections_that_have_ended(place: Place) -> None:
    """One connection stays open, and all others go to the other endpoint."""
    busy, idle = place.echo("127.0.0.2"), place.named("127.0.0.3")
    balancing = PlannedBalancing(Algorithm.LEAST_CONNECTIONS)
    place.serve(plan(busy, balancing=balancing))
    held = place.connect()
    held.sendall(b"?")
    assert held.recv(100) == b"?"
    place.serve(plan(busy, idle, balancing=balancing))
    for _ in range(10):
        eventually(lambda: len(connections(9)) == 1, "the previous connection has ended")
        assert place.answer() == "127.0.0.3"


@pytest.mark.parametrize("settings", [UserspaceSettings(relays=1)])
def test_least_connections_counts_connections_that_are_not_established_yet(place: Place) -> None:
    """The relay accepts all at once, before any of their endpoints has answered."""
    servers = [place.listen(f"127.0.0.{n}") for n in (2, 3, 4)]
    addresses = [each.getsockname() for each in servers]
    place.serve(plan(*addresses, balancing=PlannedBalancing(Algorithm.LEAST_CONNECTIONS)))
    (pid,) = place.backend.relays.pids()
    os.kill(pid, signal.SIGSTOP)
    for _ in range(30):
        place.connect()
    os.kill(pid, signal.SIGCONT)
    for server in servers:
        for _ in range(10):
            server.accept()[0].close()


def test_session_affinity_holds_over_all_relays_until_its_timeout(place: Place) -> None:
    place.serve(plan(*(place.named(f"127.0.0.{n}") for n in (2, 3, 4, 5)), affinity=600))
    for source in (f"127.0.1.{n}" for n in range(1, 9)):
        assert len({place.answer(source) for _ in range(12)}) == 1
    assert len({place.answer(f"127.0.1.{n}") for n in range(1, 9)}) > 1


def test_a_killed_relay_is_replaced_and_the_others_serve_meanwhile(place: Place) -> None:
    wanted = plan(place.echo())
    place.serve(wanted)
    before = place.backend.generation()
    pid, other = place.backend.relays.pids()
    os.kill(pid, signal.SIGSTOP)  # so that it accepts nothing that its end would reset
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: place.backend.relays.replaced == 1, "the relay is replaced")
    assert place.backend.generation() != before
    for _ in range(30):
        with place.connect() as client:
            client.sendall(b"x")
            assert client.recv(1) == b"x"
    now = place.backend.relays.pids()
    assert other in now
    assert pid not in now
    counted = place.backend.relays.counters()
    assert counted.events[Event.CONNECTED] == 30
    desired = place.backend.render([wanted], None)
    assert desired.items() <= place.backend.read().items()


def test_relays_end_with_their_agent(place: Place) -> None:
    place.serve(plan(place.echo()))
    pids = place.backend.relays.pids()
    place.backend.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(ConnectionRefusedError):  # the address is still local
        socket.create_connection((ADDRESS, PORT), 10.0)


def test_a_destroyed_listener_is_missing_until_it_is_put_again(place: Place) -> None:
    """As `ss --kill` does."""
    wanted = plan(place.echo())
    place.serve(wanted)
    key = next(key for key in place.backend.render([wanted], None) if isinstance(key, Listen))
    assert place.backend.read().get(key)
    command = ["ss", "--kill", "-tlnH", "src", ADDRESS]
    assert ADDRESS in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not place.backend.read().get(key)
    place.serve(wanted)
    place.connect().close()
