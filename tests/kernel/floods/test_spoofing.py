"""Spoofed packets of an attacker who knows a TCP connection's addresses and ports, but no sequence number.

RFC 5961: such packets end no connection. A connection that its own ends closed does end: its client may use
the port again.
"""

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.kernel.clients import FAMILIES, TCP, connected, converse, new_ports, socket_in
from tests.kernel.cluster import TCP_TARGET, eventually
from tests.kernel.floods import endpoints, spoofed
from tests.kernel.floods.endpoints import Answer
from tests.kernel.floods.spoofed import End
from tests.kernel.floods.testbed import Target, both_families, in_modes

pytestmark = pytest.mark.kernel

CONNECTIONS = 20


class Victim:
    """An established connection of the external client to a NodePort."""

    def __init__(self, target: Target, sock: socket.socket) -> None:
        self.socket = sock
        self.frontend: End = sock.getpeername()[:2]
        self.client: End = sock.getsockname()[:2]
        self.answer = Answer.read(converse(sock))
        pod = target.lab.pods[self.answer.pod]
        self.pod = pod
        self.endpoint: End = (pod.v6 if ":" in self.client[0] else pod.v4, TCP_TARGET)
        self.seen: End = self.answer[1:]
        """The client's address and port as the endpoint sees them."""

    def by_client(self, target: Target, *flags: str) -> None:
        """Send segments with the client's address."""
        attack = (spoofed.segment(self.client, self.frontend, each) for each in flags)
        spoofed.send(target.lab.outside, attack)

    def by_endpoint(self, flags: str) -> None:
        """Send a segment with the endpoint's address, from its pod."""
        spoofed.send(self.pod, [spoofed.segment(self.endpoint, self.seen, flags)])

    def answers_still(self) -> bool:
        """Whether the same endpoint answers, and sees the same client."""
        try:
            return converse(self.socket) == " ".join(map(str, self.answer))
        except ConnectionError:
            return False


def _reset_by_endpoint(target: Target, victim: Victim) -> None:
    victim.by_endpoint("R")
    victim.by_client(target, "S")


def _closed_by_both(target: Target, victim: Victim) -> None:
    victim.by_client(target, "FA")
    victim.by_endpoint("FA")
    victim.by_client(target, "A", "S")


ATTACKS: Mapping[str, Callable[[Target, Victim], None]] = {
    "SYN": lambda target, victim: victim.by_client(target, "S"),
    "RST, SYN": lambda target, victim: victim.by_client(target, "R", "S"),
    "RST and ACK, SYN": lambda target, victim: victim.by_client(target, "RA", "S"),
    "RST of the endpoint, SYN": _reset_by_endpoint,
    "FIN of both, SYN": _closed_by_both,
}
_IPVS_LACKS = "IPVS checks only flags (tcp_state_idx() of ip_vs_proto_tcp.c)"


@contextlib.contextmanager
def _victims(target: Target, family: str, port: int) -> Iterator[list[Victim]]:
    address = getattr(target.node, family)
    with contextlib.ExitStack() as stack:
        yield [
            Victim(target, stack.enter_context(connected(target.lab.outside, TCP, address, port)))
            for _ in range(CONNECTIONS)
        ]


@both_families
@pytest.mark.parametrize("attack", ATTACKS)
@in_modes(ipvs_lacks=_IPVS_LACKS)
def test_random_sequence_numbers_end_no_connection(target: Target, family: str, attack: str) -> None:
    """There are three endpoints: a SYN that selected an endpoint again would most likely get another one."""
    with _victims(target, family, target.node_port().node_port) as victims:
        for victim in victims:
            ATTACKS[attack](target, victim)
        survived = sum(victim.answers_still() for victim in victims)
    assert survived == CONNECTIONS


@both_families
@pytest.mark.parametrize("attack", ["SYN", "RST, SYN"])
@in_modes(ipvs_lacks=_IPVS_LACKS)
def test_a_connection_whose_endpoint_left_the_service_survives(
    target: Target, family: str, attack: str
) -> None:
    """The pod of the previous endpoint still serves its existing connections."""
    web = target.node_port()
    web.to(target.a)
    with _victims(target, family, web.node_port) as victims:
        web.to(target.b)
        for victim in victims:
            ATTACKS[attack](target, victim)
        survived = sum(victim.answers_still() for victim in victims)
    assert survived == CONNECTIONS


def _closed_by_endpoint(sock: socket.socket) -> None:
    """The endpoint closes first, so that the client's port is free at once."""
    sock.sendall(endpoints.CLOSE)
    assert sock.recv(1) == b""
    sock.close()


def _reset_by_client(sock: socket.socket) -> None:
    endpoints.reset_at_close(sock)
    sock.close()


def _ended_by_reset_of_endpoint(sock: socket.socket) -> None:
    sock.sendall(endpoints.RESET)
    with pytest.raises(ConnectionResetError):
        sock.recv(1)
    sock.close()


def _is_remembered(target: Target, ending: str) -> bool:
    """Whether a new SYN still reaches the previous endpoint. Connection tracking begins a new flow if the SYN
    comes from the side that sent the reset (nf_conntrack_tcp_packet(), last_dir), otherwise 10 s later."""
    return target.mode != "ebpf" and ending == "reset by the endpoint"


ENDINGS: Mapping[str, Callable[[socket.socket], None]] = {
    "closed by both": _closed_by_endpoint,
    "reset by the client": _reset_by_client,
    "reset by the endpoint": _ended_by_reset_of_endpoint,
}


@both_families
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("after", ["", "RST, SYN"], ids=["at once", "after an attack"])
@in_modes(ipvs_lacks="IPVS keeps a closed connection for up to two minutes")
def test_a_port_reused_after_a_real_end_reaches_a_current_endpoint(
    target: Target, family: str, ending: str, after: str
) -> None:
    """Also if the previous endpoint is gone, and after an attack that the connection survived."""
    web = target.node_port()
    web.to(target.a)
    source = (getattr(target.lab.outside, family), next(new_ports))
    to = (getattr(target.node, family), web.node_port)
    previous = _dialed(target, source, to)
    assert Answer.read(converse(previous)).pod == "a"
    if after:
        ATTACKS[after](target, Victim(target, previous))
        assert Answer.read(converse(previous)).pod == "a"
    web.to(target.b)
    assert Answer.read(converse(previous)).pod == "a"
    ENDINGS[ending](previous)
    with _dialed(target, source, to) as again:
        assert Answer.read(converse(again)).pod == ("a" if _is_remembered(target, ending) else "b")


def _dialed(target: Target, source: End, to: End) -> socket.socket:
    """A connection of the external client from this port, once no earlier socket has it."""
    made: list[socket.socket] = []

    def dial() -> bool:
        sock = socket_in(target.lab.outside, TCP, FAMILIES["v6" if ":" in to[0] else "v4"])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(source)
            sock.connect(to)
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
            return False
        made.append(sock)
        return True

    eventually(dial, f"port {source[1]} is free")
    return made[0]
