"""Clients that connect to an endpoint by its Service and without it, from the same port.

The kernel chooses the port of a client for each destination separately. So both connections may have the same
one, and without another port they look the same to the endpoint.
"""

import contextlib
import socket

import pytest

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, UDP, connected_from, converse, new_ports
from tests.kernel.cluster import TCP_TARGET, UDP_TARGET
from tests.kernel.two_nodes import TwoNodes, name_and_client

pytestmark = [
    pytest.mark.kernel,
    # IPVS identifies flows by client and endpoint; relays of mode userspace have ports of their own.
    pytest.mark.ways("ebpf-on", "ebpf-off", "nftables", "iptables"),
]

TARGETS = {TCP: TCP_TARGET, UDP: UDP_TARGET}


@pytest.mark.parametrize("family", ["v4", "v6"])
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
@pytest.mark.parametrize(
    ("client", "kind", "place"),
    [
        ("outside", "LoadBalancer", "here"),
        ("pod", "ClusterIP", "here"),
        ("pod", "ClusterIP", "there"),
        ("pod", "NodePort", "there"),  # masqueraded
        ("node", "ClusterIP", "there"),
    ],
)
@pytest.mark.parametrize("first", ["direct", "service"])
def test_a_direct_connection_and_one_to_a_service_may_have_the_same_port(
    two_nodes: TwoNodes, family: str, protocol: Protocol, client: str, kind: str, place: str, first: str
) -> None:
    """A SYN that meets a connection with its tuple is sent again after a second, in mode ebpf."""
    pair, pod = two_nodes, two_nodes.a if place == "here" else two_nodes.d
    if (client, kind, first, protocol, pair.by_socket) == ("pod", "NodePort", "direct", TCP, False) and (
        pair.mode == "ebpf"
    ):
        pytest.xfail("the direct connection gets no replies meanwhile: see docs/decisions/0023")
    if pair.by_socket and client != "outside":
        pytest.skip("the kernel rejects a second connection of this port to the endpoint")
    netns = {"outside": pair.x, "pod": pair.p, "node": pair.node}[client]
    web = pair.everywhere().to(pod)
    source = (getattr(netns, family), next(new_ports))
    direct = (getattr(pod, family), TARGETS[protocol])
    service = web.frontend(kind, family, protocol)
    with contextlib.ExitStack() as stack:
        clients: list[socket.socket] = []
        for target in (direct, service) if first == "direct" else (service, direct):
            clients.append(stack.enter_context(connected_from(netns, protocol, source, target)))
            for _ in range(2):
                assert [name_and_client(converse(each))[0] for each in clients] == [pod.name] * len(clients)
