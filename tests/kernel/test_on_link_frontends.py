"""Addresses of Services in the node's own network, as with layer 2 of MetalLB and kube-vip.

No machine answers for such an address while this node announces it. On other ports another machine may have
it.
"""

import contextlib
import errno
import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.linux import sysctl
from tests.kernel.clients import REFUSED, TCP, UDP, outcome
from tests.kernel.cluster import eventually
from tests.kernel.two_nodes import PORTS, Everywhere, TwoNodes, name_and_client

pytestmark = [pytest.mark.kernel, pytest.mark.ways("ebpf-on", "ebpf-off")]

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
ADDRESS = Pair("198.51.100.7", "2001:db8:51::7")
OTHER_PORT = 9000


@contextlib.contextmanager
def configured(two_nodes: TwoNodes, netns: Pod, *entries: str) -> Iterator[None]:
    """Within the block, the netns has these addresses and routes ("addr ..." and "route ...")."""
    two_nodes.lab.ip(netns, *(each.replace(" ", " add ", 1) for each in entries))
    try:
        yield
    finally:
        two_nodes.lab.ip(netns, *(each.replace(" ", " del ", 1) for each in entries))


@pytest.fixture
def web(two_nodes: TwoNodes) -> Iterator[Everywhere]:
    """A Service with on-link addresses. Their networks appear while the agent runs: one with an address of
    the node, one by a route."""
    found = two_nodes.everywhere(externalIPs=[ADDRESS.v4, ADDRESS.v6]).to(two_nodes.d)
    entries = "addr 198.51.100.1/24 dev eth0", "route 2001:db8:51::/64 dev eth0"
    with configured(two_nodes, two_nodes.node, *entries):
        eventually(lambda: len(routes(two_nodes.node)) == 2, "the frontends have routes")
        yield found
    eventually(lambda: not routes(two_nodes.node), "the routes are removed with the network")
    eventually(lambda: not gateways(two_nodes.node), "the gateways are removed")


def shown(node: Pod, *arguments: str) -> list[Any]:
    text = node.run(["ip", "-json", *arguments]).stdout
    return list(json.loads(text or "[]"))


def routes(node: Pod) -> list[Any]:
    return [each for family in ("-4", "-6") for each in shown(node, family, "route", "show", "proto", "235")]


def gateways(node: Pod) -> list[Any]:
    return [each for each in shown(node, "neighbor", "show", "nud", "permanent") if each["dev"] == "eth0"]


def names(netns: Pod, family: str) -> set[str]:
    """The servers that answer at the Service's ports."""
    address = getattr(ADDRESS, family)
    return {name_and_client(outcome(netns, each, address, PORTS[each]))[0] for each in (TCP, UDP)}


def at_other_port(netns: Pod, family: str, timeout: float = 0.5) -> str:
    return name_and_client(outcome(netns, TCP, getattr(ADDRESS, family), OTHER_PORT, timeout))[0]


@both_families
def test_frontends_answer_although_no_machine_has_the_address(
    two_nodes: TwoNodes, web: Everywhere, family: str
) -> None:
    pod = two_nodes.lab.bypassing(two_nodes.q)
    for endpoint in (two_nodes.d, two_nodes.a, two_nodes.second.host):
        web.to(endpoint)
        eventually(lambda: names(pod, family) == {endpoint.name}, "the pod is served")  # noqa: B023
        assert names(two_nodes.node, family) == {endpoint.name}
    web.to()
    for client in (two_nodes.node, two_nodes.p, pod):
        assert names(client, family) == {REFUSED}


@both_families
def test_other_ports_are_those_of_the_machine_that_has_the_address(
    two_nodes: TwoNodes, web: Everywhere, family: str
) -> None:
    """Also after that machine is replaced. Without a machine, connections fail as before."""
    node, router, device = two_nodes.node, two_nodes.lab.router, two_nodes.lab.nodes[0].cgroup.name
    number = family.removeprefix("v")
    delay = f"net/ipv{number}/neigh/eth0/retrans_time_ms"
    notify = f"net/ipv{number}/conf/{device}/{'arp_notify' if family == 'v4' else 'ndisc_notify'}"
    address = getattr(ADDRESS, family)
    owned = f"addr {address}/{'24' if family == 'v4' else '128'} dev {device}"
    node.call(functools.partial(sysctl.ensure, delay, "50"))
    node.run(["ip", "neighbor", "flush", "to", address])
    assert node.call(functools.partial(_failure, address)) == errno.EHOSTUNREACH
    with configured(two_nodes, router, owned), server(router, address):
        pods = two_nodes.q, two_nodes.lab.bypassing(two_nodes.q)
        for client in (node, *pods):
            eventually(lambda: at_other_port(client, family) == "router", "the machine answers")  # noqa: B023
        assert names(node, family) == {"d"}
        router.call(functools.partial(sysctl.ensure, notify, "1"))
        before = shown(router, "link", "show", "dev", device)[0]["address"]
        two_nodes.lab.ip(router, f"link set {device} address 02:00:00:00:00:99")
        try:
            assert at_other_port(node, family, 3.0) == "router"
            assert names(node, family) == {"d"}
        finally:
            two_nodes.lab.ip(router, f"link set {device} address {before}")
            router.call(functools.partial(sysctl.ensure, notify, "0"))


@contextlib.contextmanager
def server(netns: Pod, address: str) -> Iterator[None]:
    serving = netns.serve_echo(TCP, OTHER_PORT, address)
    try:
        yield
    finally:
        serving.kill()


def _failure(address: str) -> int:
    try:
        sockets.ask(TCP, address, OTHER_PORT, 3.0)
    except OSError as error:
        return error.errno or 0
    return 0


def test_other_machines_do_not_learn_the_gateway(two_nodes: TwoNodes, web: Everywhere) -> None:
    """A router that sends packets for the address to this node gets them back: the kernel would send it an
    ICMP redirect. For IPv4 the lab's kernel sends none; test_packet_strangers.py has such a packet."""
    router = two_nodes.lab.router
    with configured(two_nodes, router, f"route {ADDRESS.v6}/128 via {two_nodes.node.v6}"):
        before = router.call(_redirects)
        assert names(router, "v6") == {"d"}
        at_other_port(router, "v6")
        assert router.call(_redirects) == before


def _redirects() -> int:
    """The ICMPv6 redirects that the calling process's network namespace has received."""
    with open("/proc/net/snmp6") as lines:
        return int(dict(map(str.split, lines))["Icmp6InRedirects"])


def test_routes_and_gateways_that_others_remove_are_restored(two_nodes: TwoNodes, web: Everywhere) -> None:
    node = two_nodes.node
    before = routes(node), gateways(node)
    assert [len(each) for each in before] == [2, 2]
    shown_by_cleanup = two_nodes.ebpfproxy("cleanup", "--dry-run").stdout
    assert "2 routes of frontends" in shown_by_cleanup
    node.run(["ip", "route", "flush", "proto", "235"])
    eventually(lambda: (routes(node), gateways(node)) == before, "the route is restored")
    node.run(["ip", "neighbor", "flush", "dev", "eth0", "nud", "permanent"])
    eventually(lambda: (routes(node), gateways(node)) == before, "the gateways are restored")


@pytest.mark.ways("ebpf-on")
def test_routes_of_a_previous_run_are_removed_with_its_programs(two_nodes: TwoNodes, web: Everywhere) -> None:
    """Without programs at the device, other ports of the addresses would be unreachable."""
    two_nodes.restart("--tc-devices=none")
    try:
        eventually(lambda: not routes(two_nodes.node), "the routes are removed")
    finally:
        two_nodes.restart()
    eventually(lambda: len(routes(two_nodes.node)) == 2, "the routes are back")
