"""ICMP errors about packets of flows, in both directions: the receiver finds the packet that it sent
quoted."""

from typing import Any, NamedTuple

import pytest
from scapy.layers.inet6 import (
    IPv6ExtHdrDestOpt,
)

from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path.conversation import ERRORS, error
from tests.kernel.packet_path.served import (
    CLIENT_PORT,
    PORTS,
    TARGETS,
    TCP,
    UDP,
    families,
    protocols,
    serve,
)
from tests.support import headers
from tests.support.packet_path import UNSPEC, PacketPath
from tests.support.packets import V4, V6, Places, ip, transport

pytestmark = pytest.mark.kernel

wheres = pytest.mark.parametrize("where", ["here", "there"])

errors = pytest.mark.parametrize("kind", ERRORS)


class Side(NamedTuple):
    """One end of a flow. `own` is its address as it knows it, and `far` the other end's. `seen`: the address
    that the other end knows instead of its own. `received` is a packet of the other end as it arrived, and
    `sent` as it was sent."""

    device: str
    own: str
    far: str
    seen: str
    received: bytes
    sent: bytes


def open_flow(path: PacketPath, at: Places, protocol: Protocol, where: str) -> tuple[Side, Side]:
    """The sides of the client and of the endpoint, after a packet of each."""
    target = getattr(at, where)
    towards = "tunnel" if where == "there" else "pod"
    serve(path, at, target)
    request = ip(at.client, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol], b"request.")
    arrived = path.forward(request, "net", towards).raw
    seen = at.masquerade if where == "there" else at.client
    fields: dict[str, Any] = {"flags": "SA"} if protocol is TCP else {}
    answer = bytes(
        ip(target, seen) / transport(protocol, TARGETS[protocol], CLIENT_PORT, b"response", **fields)
    )
    back = path.forward(answer, towards, "net").raw
    client = Side("net", at.client, at.external, seen, back, answer)
    return client, Side(towards, target, seen, at.external, arrived, bytes(request))


@families
@protocols
@wheres
@errors
@pytest.mark.parametrize("quoted", [28, 48, None])
@pytest.mark.parametrize("side", ["client", "endpoint"])
@pytest.mark.parametrize("sender", ["router", "host"])
def test_an_icmp_error_from_one_side_reaches_the_other(
    path: PacketPath,
    at: Places,
    protocol: Protocol,
    where: str,
    kind: str,
    quoted: int | None,
    side: str,
    sender: str,
) -> None:
    """Of a router: path MTU discovery through a NodePort needs it (cilium #47755). Of the host: for example
    port unreachable of a UDP server that has just ended.

    The error's source is the address of its side that the other one knows, as with netfilter: a router on
    both sides of this node would drop its own source address as a martian. The client's connected socket
    needs this source."""
    if at is V6 and quoted == 28:
        quoted = 48
    client, endpoint = open_flow(path, at, protocol, where)
    path.counted()
    here, there = (client, endpoint) if side == "client" else (endpoint, client)
    source = at.router if sender == "router" else here.own
    packet = error(kind, source, here.far, here.received, quoted)
    outcome = path.forward(packet, here.device, there.device)
    assert outcome.verdict == UNSPEC
    assert outcome.raw == bytes(error(kind, here.seen, there.own, here.sent, quoted))
    assert path.counted()["icmp_error"] == (2 if where == "there" else 1)


@families
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
def test_a_quoted_checksum_that_is_truncated_or_absent_stays_so(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.here)
    request = ip(at.client, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol], chksum=0)
    arrived = path.forward(request, "net", "pod").raw
    size = headers.parts(arrived).outer.l4 - 14 + 8
    outcome = path.forward(error("too big", at.router, at.client, arrived, size), "pod", "net")
    assert outcome.raw == bytes(error("too big", at.external, at.client, bytes(request), size))


@families
def test_bytes_after_the_packets_end_are_not_treated_as_the_quotation(path: PacketPath, at: Places) -> None:
    """Ethernet padding and trailers are not part of a checksum."""
    _, endpoint = open_flow(path, at, TCP, "here")
    size = headers.parts(endpoint.received).outer.l4 - 14 + 8
    trailer = bytes(range(20))
    packet = bytes(error("too big", at.router, at.client, endpoint.received, size)) + trailer
    outcome = path.forward(packet, "pod", "net")
    assert outcome.raw == bytes(error("too big", at.external, at.client, endpoint.sent, size)) + trailer


@families
def test_an_icmp_error_about_a_packet_without_a_flow_is_left_alone(path: PacketPath, at: Places) -> None:
    open_flow(path, at, TCP, "there")
    quoted = bytes(ip(at.masquerade, at.there) / transport(TCP, CLIENT_PORT + 1, TARGETS[TCP]))
    for packet in (
        error("too big", at.router, at.masquerade, quoted),
        error("too big", at.router, at.external, quoted),
        error("too big", at.router, at.masquerade, quoted, 10),
        error("too big", at.router, at.masquerade, quoted, 0),
    ):
        for outcome in (path.ingress(packet), path.ingress(packet, "tunnel"), path.egress(packet)):
            assert outcome == (UNSPEC, bytes(packet), 0)


def test_an_icmp_error_that_quotes_extension_headers_is_translated(path: PacketPath) -> None:
    at = V6
    serve(path, at, at.here)
    request = ip(at.client, at.external) / IPv6ExtHdrDestOpt() / transport(UDP, CLIENT_PORT, PORTS[UDP])
    arrived = path.forward(request, "net", "pod").raw
    outcome = path.forward(error("too big", at.router, at.client, arrived), "pod", "net")
    assert outcome.raw == bytes(error("too big", at.external, at.client, bytes(request)))


def test_an_icmp_error_that_quotes_ip_options_is_translated(path: PacketPath) -> None:
    serve(path, V4, V4.here)
    request = ip(V4.client, V4.external, options=[b"\1\1\1\1"]) / transport(UDP, CLIENT_PORT, PORTS[UDP])
    arrived = path.forward(request, "net", "pod").raw
    outcome = path.forward(error("too big", V4.router, V4.client, arrived), "pod", "net")
    assert outcome.raw == bytes(error("too big", V4.external, V4.client, bytes(request)))
