"""Packets of the node to endpoints whose neighbor entry does not exist yet."""

import pytest

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, UDP, outcome
from tests.kernel.two_nodes import TwoNodes, name_and_client

pytestmark = [pytest.mark.kernel, pytest.mark.ways("ebpf-off")]


@pytest.mark.parametrize("family", ["v4", "v6"])
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
@pytest.mark.parametrize("place", ["a", "d"])
def test_the_first_packet_to_an_unknown_neighbor_arrives(
    two_nodes: TwoNodes, place: str, protocol: Protocol, family: str
) -> None:
    """On this node (a) and the other one (d). The kernel keeps the packet until the neighbor answers. Then it
    sends it by the packet's route, which must not be that to the frontend (neigh_update()). A datagram is
    sent once."""
    web = two_nodes.everywhere().to(getattr(two_nodes, place))
    two_nodes.node.run(["ip", "neigh", "flush", "all"])
    answer = outcome(two_nodes.node, protocol, *web.frontend("ClusterIP", family, protocol), 0.9)
    assert name_and_client(answer)[0] == place, "a SYN would be sent again after 1 s"
