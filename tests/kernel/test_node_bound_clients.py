"""Processes of the node that are bound to a load balancer address of the node, and connect to that address.

An endpoint on another node cannot reply to that address: the network routes it to the load balancer, or
drops it. kube-proxy masquerades such connections.
"""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.lab import sockets
from tests.kernel.clients import FAMILIES, REFUSED, SILENT, TCP, UDP, Dial, outcomes
from tests.kernel.cluster import eventually
from tests.kernel.two_nodes import PORTS, Everywhere, name_and_client
from tests.kernel.uplinks import PROTOCOLS, Uplinks

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.ways("ebpf-on", "ebpf-off", "ebpf-host", "nftables", "iptables"),
]

by_policy = pytest.mark.parametrize("policy", ["Cluster", "Local"])


@contextlib.contextmanager
def held(uplinks: Uplinks, web: Everywhere) -> Iterator[None]:
    """Within the block the node has the Service's load balancer addresses, and the agent knows it."""
    four, six = web.balancer_ips
    commands = [
        (f"addr add {four}/32 dev lo", f"addr del {four}/32 dev lo"),
        (f"addr add {six}/128 dev lo nodad", f"addr del {six}/128 dev lo"),
    ]
    with uplinks.commands(uplinks.node, commands):
        # The agent learns of new addresses a moment later. Until then they are not the node's.
        dials = [Dial(TCP, address, PORTS[TCP], source=(address, 0)) for address in web.balancer_ips]
        unserved = {SILENT, REFUSED}
        eventually(lambda: unserved.isdisjoint(outcomes(uplinks.node, dials)), "the addresses are in force")
        yield


@by_policy
def test_a_bound_process_reaches_an_endpoint_on_its_node(uplinks: Uplinks, policy: str) -> None:
    web = uplinks.everywhere(externalTrafficPolicy=policy).to(uplinks.a)
    dials = [
        Dial(protocol, address, PORTS[protocol], source=(address, 0))
        for address in web.balancer_ips
        for protocol in PROTOCOLS
    ]
    with held(uplinks, web):
        names = {name_and_client(answer)[0] for answer in outcomes(uplinks.node, dials)}
    assert names == {"a"}


@by_policy
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bound_process_reaches_an_endpoint_on_another_node_masqueraded(
    uplinks: Uplinks, family: str, policy: str
) -> None:
    """The endpoint sees the address of the uplink, which it can reply to."""
    web = uplinks.everywhere(externalTrafficPolicy=policy).to(uplinks.d)
    address = web.balancer_ips[family == "v6"]
    dials = [Dial(protocol, address, PORTS[protocol], source=(address, 0)) for protocol in PROTOCOLS]
    with held(uplinks, web):
        assert set(outcomes(uplinks.node, dials)) == {f"d {getattr(uplinks.node, family)}"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bound_process_reaches_another_node_before_the_next_hop_is_resolved(
    uplinks: Uplinks, family: str
) -> None:
    """The router does not reply to ARP requests that carry the load balancer address."""
    web = uplinks.everywhere().to(uplinks.d)
    address = web.balancer_ips[family == "v6"]
    with held(uplinks, web):
        uplinks.lab.ip(uplinks.node, "neigh flush all")
        dial = Dial(TCP, address, PORTS[TCP], source=(address, 0))
        assert outcomes(uplinks.node, [dial]) == [f"d {getattr(uplinks.node, family)}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_datagrams_of_a_bound_unconnected_socket_are_answered(uplinks: Uplinks, family: str) -> None:
    web = uplinks.everywhere().to(uplinks.d)
    address = web.balancer_ips[family == "v6"]

    def ask() -> tuple[str, str]:
        with socket.socket(FAMILIES[family], socket.SOCK_DGRAM) as client:
            client.settimeout(sockets.ANSWERED)
            client.bind((address, 0))
            client.sendto(b"?", (address, PORTS[UDP]))
            try:
                answer, peer = client.recvfrom(1 << 16)
            except TimeoutError:
                return SILENT, ""
            return answer.decode(), peer[0]

    with held(uplinks, web):
        assert uplinks.node.call(ask) == (f"d {getattr(uplinks.node, family)}", address)
