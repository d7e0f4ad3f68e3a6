"""Which endpoint answers, and which client address it sees: by frontend, policy, and type of client.

The rows are those of kube-proxy's syncProxyRules (pkg/proxy/iptables/proxier.go): policy Local concerns
internal clients at a ClusterIP, and at all other frontends only external clients. One difference is
intended, in mode ebpf: an endpoint on the node that the client connects to always sees the client's address.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import REFUSED, SILENT, TCP, UDP, Dial, outcomes
from tests.kernel.differences import DIFFERENCES, Differences
from tests.kernel.two_nodes import FRONTENDS, Everywhere, TwoNodes, name_and_client

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.ways(
        "ebpf-on", "ebpf-off", "ebpf-host", "nftables", "iptables", "iptables-nft", "ipvs", "userspace"
    ),
]

POLICIES = ("Cluster", "Local")
PLACES = ("here", "there", "nowhere")
SILENCE = 0.3


class Row(NamedTuple):
    """A frontend of the Service with this policy and with its endpoint at that place."""

    policy: str
    place: str
    frontend: str
    family: str
    protocol: Protocol


class Table(NamedTuple):
    """A Service for each policy, internal and external, and for each place of its endpoint."""

    pair: TwoNodes
    webs: dict[tuple[str, str], Everywhere]


ROWS = [Row(*each) for each in itertools.product(POLICIES, PLACES, FRONTENDS, ("v4", "v6"), (TCP, UDP))]


@pytest.fixture(scope="module")
def table(two_nodes: TwoNodes) -> Iterator[Table]:
    backends = {"here": (two_nodes.a,), "there": (two_nodes.d,), "nowhere": ()}
    webs = {}
    for policy, place in itertools.product(POLICIES, PLACES):
        web = two_nodes.everywhere(internalTrafficPolicy=policy, externalTrafficPolicy=policy)
        web.backends = backends[place]
        webs[policy, place] = web
    first, *others = webs.values()
    two_nodes.serve_together(first, *others)
    yield Table(two_nodes, webs)
    two_nodes.write(first.name)


class Client(NamedTuple):
    """`group` as in kube-proxy's table: pod, node or outside. `by_socket`: its packets are not translated."""

    netns: Pod
    group: str
    by_socket: bool


def client(table: Table, kind: str, way: str) -> Client:
    pair = table.pair
    if kind == "bypassing":
        netns = pair.lab.bypassing(pair.p)
        pair.await_packets_of(netns, table.webs["Cluster", "here"])
        return Client(netns, "pod", False)
    if kind == "pod":
        return Client(pair.p, "pod", way == "ebpf-on")
    if kind == "node":
        return Client(pair.node, "node", way in ("ebpf-on", "ebpf-host"))
    return Client(pair.x, "outside", False)


def answerer(row: Row, group: str, differences: Differences) -> str:
    """The name of the endpoint that answers, REFUSED, SILENT or DENIED."""
    own_external = group == "node" and row.frontend in ("ExternalIP", "LoadBalancer")
    if row.place == "nowhere" and own_external and differences.own_external == SILENT:
        return SILENT  # the packet leaves the node, whose filter accepts it
    if row.place == "nowhere" and row.frontend == "NodePort" and not differences.at_output:
        return REFUSED  # at input, also for packets of the node to its own address
    if row.place == "nowhere":
        return differences.to(group, row.protocol, REFUSED)
    restricted = row.frontend == "ClusterIP" or group == "outside"
    if row.policy == "Local" and restricted and row.place == "there":
        return differences.to(group, row.protocol, SILENT)
    return {"here": "a", "there": "d"}[row.place]


def seen(table: Table, row: Row, who: Client) -> set[str]:
    """The client addresses that the endpoint may see."""
    pair, own = table.pair, getattr(who.netns, row.family)
    uplink: str = getattr(pair.node, row.family)
    gateway: str = getattr(pair.lab.addresses.gateway(0), row.family)
    if who.group == "node":
        return {uplink, gateway}
    here = row.place == "here"
    if who.by_socket or (here and not DIFFERENCES[pair.mode].masquerades_here):
        return {own}
    masqueraded = {gateway if here else uplink}
    if DIFFERENCES[pair.mode].by_relay:
        return masqueraded
    if row.frontend == "ClusterIP":
        return masqueraded if who.group == "outside" else {own}
    return masqueraded if row.policy == "Cluster" else {own}


@pytest.mark.parametrize("kind", ["pod", "bypassing", "node", "outside"])
def test_every_frontend_serves_the_clients_that_its_policy_admits(
    table: Table, kind: str, request: pytest.FixtureRequest
) -> None:
    """All rows are dialed concurrently, since each silent one takes its full timeout."""
    who = client(table, kind, request.node.callspec.params["two_nodes"])
    expected = {row: answerer(row, who.group, DIFFERENCES[table.pair.mode]) for row in ROWS}
    dials = [_dial(table, row, expected[row]) for row in ROWS]
    found = {
        row: name_and_client(answer) for row, answer in zip(ROWS, outcomes(who.netns, dials), strict=True)
    }
    assert {row: name for row, (name, _) in found.items()} == expected
    strange = {
        row: client for row, (_, client) in found.items() if client and client not in seen(table, row, who)
    }
    assert strange == {}


def _dial(table: Table, row: Row, expected: str) -> Dial:
    timeout = SILENCE if expected == SILENT else sockets.ANSWERED
    return table.webs[row.policy, row.place].dial(row.frontend, row.family, row.protocol, timeout)
