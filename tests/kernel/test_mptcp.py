"""Multipath TCP (RFC 8684): connections to a Service, by the node and by a pod.

The hooks run for the subflow that connects, and for the MPTCP socket in getpeername(). They have different
cookies. No hook runs when a subflow is closed.
"""

import socket

import pytest

from ebpfproxy.lab import Netns
from tests.kernel.clients import FAMILIES, TCP
from tests.kernel.two_nodes import PORTS, name_and_client
from tests.kernel.uplinks import Uplinks

pytestmark = [pytest.mark.kernel, pytest.mark.ways("ebpf-on", "nftables")]

MPTCP = socket.IPPROTO_MPTCP


def ask(netns: Netns, family: str, frontend: tuple[str, int]) -> tuple[str, tuple[str, int]]:
    """The endpoint's name, and the peer that the process sees."""

    def connect() -> tuple[str, tuple[str, int]]:
        with socket.socket(FAMILIES[family], socket.SOCK_STREAM, MPTCP) as client:
            client.settimeout(5)
            client.connect(frontend)
            client.sendall(b"?")
            return name_and_client(client.recv(1 << 16).decode())[0], client.getpeername()[:2]

    return netns.call(connect)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("client", ["node", "pod"])
def test_an_mptcp_socket_sees_the_frontend_as_its_peer(uplinks: Uplinks, client: str, family: str) -> None:
    web = uplinks.everywhere().to(uplinks.d)
    frontend = (getattr(web, family), PORTS[TCP])
    netns = uplinks.node if client == "node" else uplinks.b
    assert ask(netns, family, frontend) == ("d", frontend)
