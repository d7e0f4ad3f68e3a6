"""Connections that netfilter masquerades, on a node where mode ebpf takes over."""

import contextlib
import socket

import pytest

from ebpfproxy.linux.netlink import conntrack
from tests.kernel.clients import TCP, connected, converse, socket_in
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.kernel.two_nodes import TwoNodes, name_and_client

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("previous", ["nftables", "iptables", "ipvs"])
def test_a_port_used_for_masquerading_by_the_previous_mode_is_not_reused(
    restartable_pair: TwoNodes, previous: str
) -> None:
    """A new client has the port to which an older connection to the same endpoint is masqueraded."""
    skip_without_ipvs(previous)
    pair, addresses = restartable_pair, (restartable_pair.node.v4, restartable_pair.node.v6)
    pair.mode = previous
    pair.start()
    web = pair.everywhere().to(pair.d)
    with contextlib.ExitStack() as sockets:
        older = [sockets.enter_context(connected(pair.x, TCP, each, web.node_port)) for each in addresses]
        ports = [masqueraded_as(pair, each) for each in older]
        pair.mode = "ebpf"
        pair.start()
        for address, old, port in zip(addresses, older, ports, strict=True):
            new = sockets.enter_context(socket_in(pair.x, TCP, old.family))
            new.bind(("", port))
            new.connect((address, web.node_port))
            for each in (new, old, new):
                assert name_and_client(converse(each))[0] == "d"


def masqueraded_as(pair: TwoNodes, client: socket.socket) -> int:
    """The port to which the first node masquerades a connection; it differs from the client's port."""
    own = client.getsockname()[1]
    flows = pair.node.call(lambda: list(conntrack.masqueraded()))
    (port,) = (flow.reply_destination_port for flow in flows if flow.source_port == own)
    assert port != own
    return port
