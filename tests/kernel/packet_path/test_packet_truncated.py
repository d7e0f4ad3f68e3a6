"""Truncated packets: each prefix of each kind of packet is left alone, or the output is valid."""

from collections.abc import Callable

import pytest
from scapy.layers.inet import IPOption_NOP
from scapy.layers.inet6 import IPv6ExtHdrDestOpt, IPv6ExtHdrFragment, IPv6ExtHdrHopByHop

from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path.conversation import error
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, SCTP, TARGETS, TCP, UDP, serve
from tests.support import headers
from tests.support.packet_path import REDIRECT, UNSPEC, PacketPath
from tests.support.packets import V4, V6, Places, ip, ping, transport

pytestmark = pytest.mark.kernel


def _to_service(at: Places) -> list[bytes]:
    found = [ip(at.client, at.external) / transport(p, CLIENT_PORT, PORTS[p], bytes(12)) for p in PORTS]
    if at is V4:
        found.append(
            ip(at.client, at.external, options=[IPOption_NOP()] * 8) / transport(TCP, CLIENT_PORT, 80)
        )
    else:
        for extension in (IPv6ExtHdrHopByHop(), IPv6ExtHdrDestOpt(), IPv6ExtHdrFragment(id=3)):
            found.append(ip(at.client, at.external) / extension / transport(UDP, CLIENT_PORT, 53))
    return [bytes(packet) for packet in found]


def _from_endpoint(at: Places) -> list[bytes]:
    return [
        bytes(ip(at.there, at.masquerade) / transport(p, TARGETS[p], CLIENT_PORT, bytes(12))) for p in PORTS
    ]


def _errors(at: Places) -> list[bytes]:
    found = []
    for protocol in PORTS:
        sent = bytes(
            ip(at.masquerade, at.there) / transport(protocol, CLIENT_PORT, TARGETS[protocol], bytes(12))
        )
        found += [bytes(error(kind, at.router, at.masquerade, sent)) for kind in ("too big", "time exceeded")]
    return found


def _pings(at: Places) -> list[bytes]:
    return [bytes(ping(at.client, at.external))]


KINDS: dict[str, Callable[[Places], list[bytes]]] = {
    "to a Service": _to_service,
    "from an endpoint": _from_endpoint,
    "errors": _errors,
    "pings": _pings,
}


def least(frame: bytes) -> int:
    """The length of the shortest prefix that a test run accepts: with IP's plain header."""
    return 34 if frame[12:14] == b"\x08\x00" else 54


@pytest.mark.parametrize("at", [V4, V6], ids=["v4", "v6"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("endpoints", [True, False], ids=["served", "refused"])
def test_every_prefix_of_a_packet_is_handled(
    path: PacketPath, at: Places, kind: str, endpoints: bool
) -> None:
    serve(path, at, at.there)
    for packet in KINDS["to a Service"](at)[:3]:
        path.forward(packet, "net", "tunnel")
    if not endpoints:
        serve(path, at)
        path.forget_flows()
    for packet in KINDS[kind](at):
        for size in range(least(packet), len(packet) + 1):
            _check(path, packet[:size])


def _check(path: PacketPath, frame: bytes) -> None:
    """Check it at ingress, and at egress for each device that it may have arrived on."""
    for outcome in (
        path.ingress(frame),
        path.ingress(frame, "tunnel"),
        path.egress(frame),
        path.egress(frame),
        path.egress(frame, came_in=""),
    ):
        if outcome.verdict == UNSPEC and outcome.raw == frame:
            continue
        before = headers.read(frame)
        assert before, f"{len(frame)} bytes have no transport, and were changed"
        if outcome.verdict == UNSPEC:
            after = headers.parts(outcome.raw)
            assert len(outcome.raw) == len(frame)
            assert headers.defects(frame, headers.parts(frame)) == headers.defects(outcome.raw, after)
        elif outcome.verdict == REDIRECT and len(outcome.raw) >= before.end:
            assert headers.read(outcome.raw)


@pytest.mark.parametrize("at", [V4, V6], ids=["v4", "v6"])
@pytest.mark.parametrize("protocol", [TCP, UDP, SCTP], ids=["tcp", "udp", "sctp"])
def test_a_packet_with_a_truncated_transport_header_is_left_alone(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.there)
    packet = bytes(ip(at.client, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol], bytes(12)))
    whole = least(packet) + {TCP: 20, UDP: 8, SCTP: 12}[protocol]
    for size in range(least(packet), whole):
        assert path.ingress(packet[:size]) == (UNSPEC, packet[:size], 0)
    assert path.counted() == {"unparsed": whole - least(packet)}
    assert path.ingress(packet[:whole]).raw != packet[:whole]
