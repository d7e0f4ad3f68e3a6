"""The PROXY protocol, read by a parser that follows the specification and shares no code with the relay.

Source: https://www.haproxy.org/download/2.9/doc/proxy-protocol.txt, section 2.2.
"""

import ipaddress
import socket
from typing import NamedTuple

import pytest

from ebpfproxy.backends.userspace.relay import proxy_protocol
from ebpfproxy.plan.balancing import PlannedBalancing
from tests.kernel.userspace_relay.conftest import ADDRESS, PORT, Place, plan


class Header(NamedTuple):
    source: tuple[str, int]
    destination: tuple[str, int]


def parse(content: bytes) -> tuple[Header, bytes]:
    """The header, and what follows it."""
    assert content[:12] == bytes.fromhex("0d0a0d0a000d0a515549540a")
    assert content[12] >> 4 == 2, "version"
    assert content[12] & 15 == 1, "command PROXY"
    assert content[13] & 15 == 1, "STREAM"
    size = {1: 4, 2: 16}[content[13] >> 4]
    length = int.from_bytes(content[14:16])
    body = content[16 : 16 + length]
    assert length == 2 * size + 4
    ends = [str(ipaddress.ip_address(body[at : at + size])) for at in (0, size)]
    ports = [int.from_bytes(body[at : at + 2]) for at in (2 * size, 2 * size + 2)]
    return Header((ends[0], ports[0]), (ends[1], ports[1])), content[16 + length :]


@pytest.mark.kernel
def test_the_endpoint_gets_the_addresses_of_the_client_before_its_bytes(place: Place) -> None:
    server = place.listen()
    place.serve(plan(server.getsockname(), balancing=PlannedBalancing(proxy_protocol=True)))
    with place.connect("127.0.0.77") as client:
        client.sendall(b"GET /")
        client.shutdown(socket.SHUT_WR)
        peer, _ = server.accept()
        content = b"".join(iter(lambda: peer.recv(100), b""))
        header, rest = parse(content)
        assert header == Header(client.getsockname(), (ADDRESS, PORT))
        assert header.source[0] == "127.0.0.77"
        assert rest == b"GET /"


def test_addresses_of_ipv6_have_sixteen_bytes() -> None:
    header, rest = parse(proxy_protocol.header(("fd00::1", 40000), ("fd00:10:96::1", 443)))
    assert header == Header(("fd00::1", 40000), ("fd00:10:96::1", 443))
    assert not rest
