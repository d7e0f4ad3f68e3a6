"""Messages between agent and relays."""

import socket
import threading

import pytest

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.entries import Balanced, Balancing, Listen, Listening, NodePorts, Pods
from ebpfproxy.backends.userspace.messages import Change, Done, Failure, Held, Read
from ebpfproxy.model.address import Family, Protocol, parse_address, parse_network
from ebpfproxy.plan.service_plan import Frontend

SERVICE = Balanced(Family.IPV6, "default/web:http", Protocol.UDP)
KEY = Listen(Family.IPV6, Frontend(parse_address("fd00::1"), 53, Protocol.UDP))
LISTENING = Listening(
    SERVICE,
    32821,
    False,
    True,
    True,
    Pods(parse_network("fd00::/16"), "", False),
    (parse_network("10.0.0.0/8"),),
)


def test_a_change_is_decoded_as_it_was() -> None:
    held = Held(
        [(NodePorts(Family.IPV4), (parse_address("192.0.2.1"),))],
        [(SERVICE, Balancing(b"x" * 20, 600, "random", (3, 1)))],
        [(KEY, LISTENING)],
    )
    change = Change(held, [KEY], [SERVICE])
    assert messages.decode_request(messages.encode(change)[messages.LENGTH.size :]) == change


def test_an_answer_arrives_in_pieces_and_the_end_of_the_relay_is_an_error() -> None:
    here, there = socket.socketpair()
    answer = Done([Failure(KEY, 98, "[fd00::1]:53")] * 10_000)

    def relay() -> None:
        there.recv(100)
        there.sendall(messages.encode(answer))
        there.recv(100)
        there.close()

    running = threading.Thread(target=relay)
    running.start()
    with here:
        assert messages.ask(here, Read()) == answer
        with pytest.raises((EOFError, OSError)):
            messages.ask(here, Read())
    running.join()
