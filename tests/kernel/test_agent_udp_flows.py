"""UDP clients go on with their sockets while no agent runs, in the modes that use the NAT of the kernel."""

import contextlib
import functools
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.lab import Pod
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netlink.conntrack import Flow
from ebpfproxy.model.address import format_address
from tests.kernel.clients import UDP, connected, converse
from tests.kernel.cluster import UDP_TARGET, Cluster, eventually
from tests.kernel.ipvs_here import skip_without_ipvs

pytestmark = pytest.mark.kernel

MODES = {
    "nftables": ("--proxy-mode=nftables",),
    "iptables-legacy": ("--proxy-mode=iptables", "--iptables-backend=legacy"),
    "iptables-nft": ("--proxy-mode=iptables", "--iptables-backend=nft"),
    "ipvs": ("--proxy-mode=ipvs", "--iptables-backend=legacy"),
}
FOREIGN = "198.51.100.53"
REMEMBERED = "600"
"""Seconds that connection tracking keeps a UDP flow without a packet. In the default of 30 s an agent
may not have started in a VM."""


@pytest.fixture(params=MODES)
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    skip_without_ipvs(request.param)
    return "--iptables-min-sync-period=0s", *MODES[request.param]


def flows(cluster: Cluster, dialled: str) -> list[Flow]:
    """Those to an address, translated or not."""
    found = cluster.node.call(lambda: list(conntrack.flows(UDP)))
    return [flow for flow in found if format_address(flow.destination) == dialled]


def remember_flows(cluster: Cluster) -> None:
    for name in ("nf_conntrack_udp_timeout", "nf_conntrack_udp_timeout_stream"):
        cluster.node.call(functools.partial(sysctl.ensure, f"net/netfilter/{name}", REMEMBERED))


@contextlib.contextmanager
def foreign_service(cluster: Cluster, pod: Pod) -> Iterator[None]:
    """Within the block, somebody else's rules send FOREIGN to a pod."""
    rule = f"ip daddr {FOREIGN} udp dport 53 dnat to {pod.v4}:{UDP_TARGET}"
    text = f"table ip others {{ chain pre {{ type nat hook prerouting priority -90; {rule}; }}; }}"
    cluster.node.run(["nft", "-f", "-"], stdin=text)
    try:
        yield
    finally:
        cluster.node.run(["nft", "delete", "table", "ip", "others"])


def test_flows_of_a_service_that_went_meanwhile_are_ended_and_nobody_elses(
    rough: Cluster, flags: tuple[str, ...]
) -> None:
    """Regression: kubernetes issue 139628: a client that goes on sending keeps its flow for ever."""
    rough.start(*flags)
    remember_flows(rough)
    gone, stays = rough.service(node_port=True).to(rough.a), rough.service().to(rough.a)
    node = rough.node.v4
    with foreign_service(rough, rough.b), contextlib.ExitStack() as stack:

        def dial(place: Pod, address: str, port: int = 53) -> socket.socket:
            client = stack.enter_context(connected(place, UDP, address, port))
            assert converse(client) in ("a", "b")
            return client

        dialled = {each: dial(rough.p, each) for each in (gone.v4, gone.v6, stays.v4, FOREIGN)}
        dial(rough.lab.outside, node, gone.node_port)
        before = {each: flows(rough, each) for each in (stays.v4, FOREIGN)}
        rough.end()
        rough.write(gone.name)
        for each in dialled:
            assert flows(rough, each), "the kernel goes on"
        rough.start(*flags)
        for address in (gone.v4, gone.v6, node):
            eventually(lambda of=address: not flows(rough, of), f"flows to {address} are ended")  # type: ignore[misc]
        assert {each: flows(rough, each) for each in before} == before
        assert converse(dialled[FOREIGN]) == "b"
        assert converse(dialled[stays.v4]) == "a"
        by_agent = 0 if "--proxy-mode=ipvs" in flags else 3  # IPVS ends them along with the virtual server
        assert rough.metric("kubeproxy_conntrack_reconciler_deleted_entries_total") == by_agent


def test_flows_to_an_endpoint_that_went_meanwhile_are_ended(rough: Cluster, flags: tuple[str, ...]) -> None:
    rough.start(*flags)
    web = rough.service().to(rough.a)
    with connected(rough.p, UDP, web.v4, 53) as client:
        assert converse(client) == "a"
        rough.end()
        web.to(rough.b)
        rough.start(*flags)
        eventually(lambda: converse(client) == "b", "the next datagram goes to the other endpoint")
