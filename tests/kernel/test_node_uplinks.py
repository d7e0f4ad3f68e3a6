"""External clients of a node with two uplinks: which frontends answer, by each uplink.

The modes nftables and iptables are the reference: frontends that answer there answer in mode ebpf, too.
"""

import pytest

from ebpfproxy.lab import sockets
from tests.kernel.clients import SILENT, outcomes
from tests.kernel.two_nodes import name_and_client
from tests.kernel.uplinks import (
    CASES,
    FAMILIES,
    FIRST,
    NAMES,
    PROTOCOLS,
    SECOND,
    SILENCE,
    STRICT,
    Uplinks,
    answers,
    endpoint,
    every,
    more,
    wanted,
)

pytestmark = pytest.mark.kernel

by_case = pytest.mark.parametrize(("policy", "place"), CASES)


# Requests by one uplink, replies by the other


@by_case
def test_replies_may_leave_by_another_uplink(uplinks: Uplinks, policy: str, place: str) -> None:
    """Requests arrive by the second uplink. The route to the client is by the first one."""
    rows = every([("NodePort", SECOND), ("LoadBalancer", SECOND)])
    with uplinks.asymmetric(), uplinks.balance_to(SECOND):
        before = uplinks.sent()
        assert answers(uplinks, policy, place, rows) == wanted(place, rows)
        sent = more(uplinks.sent(), before)
    assert sent[FIRST] > 2 * len(rows)
    assert sent[SECOND] < len(rows)


@by_case
def test_a_strict_reverse_path_filter_accepts_requests_by_the_uplink_of_the_replies(
    uplinks: Uplinks, policy: str, place: str
) -> None:
    """The filter is strict on all devices, those of pods included."""
    rows = every([("NodePort", FIRST), ("LoadBalancer", FIRST)])
    with uplinks.reverse_path_filter(uplinks.node, STRICT):
        assert answers(uplinks, policy, place, rows) == wanted(place, rows)


@by_case
def test_a_strict_reverse_path_filter_drops_requests_by_another_uplink(
    uplinks: Uplinks, policy: str, place: str
) -> None:
    """IPv6 has no such filter. With a loose filter these requests are answered: see above."""
    rows = every([("NodePort", SECOND)])
    expected = {row: SILENT if row.family == "v4" else name for row, name in wanted(place, rows).items()}
    with uplinks.asymmetric(), uplinks.reverse_path_filter(uplinks.node, STRICT):
        assert answers(uplinks, policy, place, rows, SILENCE) == expected


# Equal-cost routes


@by_case
@pytest.mark.parametrize("hash_policy", ["0", "1"])
def test_frontends_answer_over_equal_cost_routes(
    uplinks: Uplinks, policy: str, place: str, hash_policy: str
) -> None:
    """The client, load balancer addresses and the other node have equal-cost routes. The node's reverse path
    filter is strict: it accepts each of the routes."""
    web = uplinks.everywhere(externalTrafficPolicy=policy).to(endpoint(uplinks, place))
    sources = uplinks.lab.addresses.further(16)
    rows = every([("NodePort", FIRST), ("NodePort", SECOND), ("LoadBalancer", FIRST)])
    dials = [
        uplinks.dial(web, row, sockets.ANSWERED, source=getattr(source, row.family))
        for row in rows
        for source in sources
    ]
    with uplinks.equal_cost_routes(hash_policy):
        before = uplinks.sent()
        found = {name_and_client(answer)[0] for answer in outcomes(uplinks.x, dials)}
        sent = more(uplinks.sent(), before)
    assert found == {NAMES[place]}
    assert min(sent.values()) > 2 * len(sources), sent


@pytest.mark.parametrize("family", FAMILIES)
def test_host_originated_connections_work_over_equal_cost_routes(uplinks: Uplinks, family: str) -> None:
    """The hash includes the ports, so that each connection may take another path."""
    web = uplinks.everywhere().to(uplinks.d)
    frontends = ("ClusterIP", "LoadBalancer", "ExternalIP")
    dials = [
        web.dial(kind, family, protocol, sockets.ANSWERED)
        for kind in frontends
        for protocol in PROTOCOLS
        for _ in range(16)
    ]
    with uplinks.equal_cost_routes("1"):
        found = {name_and_client(answer)[0] for answer in outcomes(uplinks.node, dials)}
    assert found == {"d"}


@pytest.mark.ways("ebpf-on")
@pytest.mark.parametrize("family", FAMILIES)
def test_redirected_packets_work_over_equal_cost_routes(uplinks: Uplinks, family: str) -> None:
    """With --ebpf-redirect, for external clients of endpoints on another node."""
    uplinks.restart("--ebpf-redirect")
    try:
        web = uplinks.everywhere().to(uplinks.d)
        rows = every([("NodePort", FIRST), ("NodePort", SECOND), ("LoadBalancer", FIRST)], [family])
        dials = [uplinks.dial(web, row, sockets.ANSWERED) for row in rows for _ in range(16)]
        with uplinks.equal_cost_routes("1"):
            assert {name_and_client(answer)[0] for answer in outcomes(uplinks.x, dials)} == {"d"}
    finally:
        uplinks.restart()


# Load balancer addresses that the node holds


@by_case
def test_a_load_balancer_address_with_a_local_route_on_the_node_answers(
    uplinks: Uplinks, policy: str, place: str
) -> None:
    """Some cloud agents add a local route to the address, without the address, for direct server return."""
    web = uplinks.everywhere(externalTrafficPolicy=policy).to(endpoint(uplinks, place))
    rows = every([("LoadBalancer", SECOND)])
    local = [f"local {address} dev {FIRST} table local" for address in web.balancer_ips]
    dials = [uplinks.dial(web, row, sockets.ANSWERED) for row in rows]
    with uplinks.asymmetric(), uplinks.balance_to(SECOND), uplinks.routes(uplinks.node, *local):
        names = {name_and_client(answer)[0] for answer in outcomes(uplinks.x, dials)}
    assert names == {NAMES[place]}
