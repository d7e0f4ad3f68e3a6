"""UDP flows that exist while no agent runs, in the modes that use the kernel's NAT."""

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
"""Seconds for which connection tracking keeps an idle UDP flow. An agent in a VM may take longer to start
than the default of 30 s."""


@pytest.fixture(params=MODES)
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    skip_without_ipvs(request.param)
    return "--iptables-min-sync-period=0s", *MODES[request.param]


def flows(cluster: Cluster, destination: str) -> list[Flow]:
    """The flows to an address, translated or not."""
    found = cluster.node.call(lambda: list(conntrack.flows(UDP)))
    return [flow for flow in found if format_address(flow.destination) == destination]


def remember_flows(cluster: Cluster) -> None:
    for name in ("nf_conntrack_udp_timeout", "nf_conntrack_udp_timeout_stream"):
        cluster.node.call(functools.partial(sysctl.ensure, f"net/netfilter/{name}", REMEMBERED))


@contextlib.contextmanager
def foreign_service(cluster: Cluster, pod: Pod) -> Iterator[None]:
    """Within the block, foreign rules translate FOREIGN to a pod."""
    rule = f"ip daddr {FOREIGN} udp dport 53 dnat to {pod.v4}:{UDP_TARGET}"
    text = f"table ip others {{ chain pre {{ type nat hook prerouting priority -90; {rule}; }}; }}"
    cluster.node.run(["nft", "-f", "-"], stdin=text)
    try:
        yield
    finally:
        cluster.node.run(["nft", "delete", "table", "ip", "others"])


def test_only_flows_of_a_service_deleted_while_stopped_are_ended(
    restartable: Cluster, flags: tuple[str, ...]
) -> None:
    """Regression: kubernetes issue 139628: a client that keeps sending keeps its flow for ever."""
    restartable.start(*flags)
    remember_flows(restartable)
    deleted, kept = (
        restartable.service(node_port=True).to(restartable.a),
        restartable.service().to(restartable.a),
    )
    node = restartable.node.v4
    with foreign_service(restartable, restartable.b), contextlib.ExitStack() as stack:

        def dial(pod: Pod, address: str, port: int = 53) -> socket.socket:
            client = stack.enter_context(connected(pod, UDP, address, port))
            assert converse(client) in ("a", "b")
            return client

        clients_by_address = {
            each: dial(restartable.p, each) for each in (deleted.v4, deleted.v6, kept.v4, FOREIGN)
        }
        dial(restartable.lab.outside, node, deleted.node_port)
        before = {each: flows(restartable, each) for each in (kept.v4, FOREIGN)}
        restartable.end()
        restartable.write(deleted.name)
        for each in clients_by_address:
            assert flows(restartable, each), "the kernel keeps the flow"
        restartable.start(*flags)
        for address in (deleted.v4, deleted.v6, node):
            eventually(lambda of=address: not flows(restartable, of), f"flows to {address} are ended")  # type: ignore[misc]
        assert {each: flows(restartable, each) for each in before} == before
        assert converse(clients_by_address[FOREIGN]) == "b"
        assert converse(clients_by_address[kept.v4]) == "a"
        by_agent = 0 if "--proxy-mode=ipvs" in flags else 3  # IPVS ends them together with the virtual server
        assert restartable.metric("kubeproxy_conntrack_reconciler_deleted_entries_total") == by_agent


def test_flows_to_an_endpoint_removed_while_stopped_are_ended(
    restartable: Cluster, flags: tuple[str, ...]
) -> None:
    restartable.start(*flags)
    web = restartable.service().to(restartable.a)
    with connected(restartable.p, UDP, web.v4, 53) as client:
        assert converse(client) == "a"
        restartable.end()
        web.to(restartable.b)
        restartable.start(*flags)
        eventually(lambda: converse(client) == "b", "the next datagram goes to the other endpoint")
