"""External clients of a node that routes replies by marks and by source addresses.

The router drops packets whose source address is not an address of the uplink that sent them.
"""

import contextlib
from collections.abc import Iterator

import pytest

from ebpfproxy.lab import sockets
from tests.kernel.clients import SILENT
from tests.kernel.uplinks import (
    CASES,
    FIRST,
    LOOSE,
    RP_FILTER,
    SECOND,
    SILENCE,
    Uplinks,
    answers,
    every,
    wanted,
)

pytestmark = pytest.mark.kernel

by_case = pytest.mark.parametrize(("policy", "place"), CASES)
TABLE = 101


@contextlib.contextmanager
def aws(uplinks: Uplinks) -> Iterator[None]:
    """The first node as the Amazon VPC CNI configures it, for IPv4 only. The first uplink is the primary
    interface (ENI), and the pods have addresses of the second uplink.

    Connections that arrive on the primary interface for a local address are marked, and their replies are
    routed by the mark. Source: amazon-vpc-cni-k8s, pkg/networkutils/network.go (`toPodRulePriority` 512,
    `hostRulePriority` 1024, `fromPodRulePriority` 1536, `mainENIMark` 0x80, "AWS, primary ENI").
    """
    gateway, pod = uplinks.second_gateway.v4, uplinks.a.v4
    mangle = "iptables-legacy -w -t mangle {} PREROUTING -m comment --comment primary-ENI"
    marks = (
        f"{mangle} -i {FIRST} -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-mark 0x80/0x80",
        f"{mangle} -i veth+ -j CONNMARK --restore-mark --mask 0x80",
    )
    routes = (
        f"{gateway} dev {SECOND} scope link table {TABLE}",
        f"default via {gateway} dev {SECOND} table {TABLE}",
    )
    rules = (
        f"to {pod} lookup main priority 512",
        "fwmark 0x80/0x80 lookup main priority 1024",
        f"from {pod} lookup {TABLE} priority 1536",
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(uplinks.routes(uplinks.lab.router, f"{pod} via {uplinks.second_address.v4}"))
        stack.enter_context(uplinks.checked_sources())
        stack.enter_context(uplinks.sysctls(uplinks.node, {RP_FILTER.format(FIRST): LOOSE}))
        stack.enter_context(uplinks.routes(uplinks.node, *routes))
        stack.enter_context(uplinks.rules(uplinks.node, *rules))
        for rule in marks:
            uplinks.node.run(rule.format("-A").split())
            stack.callback(uplinks.node.run, rule.format("-D").split())
        yield


@by_case
def test_node_ports_answer_with_the_routes_of_the_amazon_vpc_cni(
    uplinks: Uplinks, policy: str, place: str
) -> None:
    """In mode ebpf no connection to an endpoint of this node gets the mark: its destination is already the
    endpoint when the mark's rule sees it."""
    rows = every([("NodePort", FIRST)], families=["v4"])
    with aws(uplinks):
        assert answers(uplinks, policy, place, rows, sockets.ANSWERED) == wanted(place, rows)


@by_case
def test_node_ports_answer_when_replies_are_routed_by_the_mark_of_their_uplink(
    uplinks: Uplinks, policy: str, place: str
) -> None:
    """A connection's mark identifies the uplink that it arrived on, for every destination. Its replies leave
    by that uplink."""
    rows = every([("NodePort", FIRST), ("NodePort", SECOND)], families=["v4"])
    gateway = uplinks.second_gateway.v4
    marks = f"""
        table inet marks {{
            chain prerouting {{
                type filter hook prerouting priority mangle;
                iifname "{SECOND}" ct state new ct mark set 0x100
                iifname != "{SECOND}" meta mark set ct mark
            }}
        }}
    """
    with (
        uplinks.checked_sources(),
        uplinks.reverse_path_filter(uplinks.node, LOOSE),
        uplinks.routes(
            uplinks.node,
            f"{gateway} dev {SECOND} scope link table {TABLE}",
            f"default via {gateway} dev {SECOND} table {TABLE}",
            f"{uplinks.lab.addresses.pods(0).v4} dev {uplinks.a.device} table {TABLE}",
        ),
        uplinks.rules(uplinks.node, f"fwmark 0x100 lookup {TABLE} priority 1000"),
        uplinks.nftables(uplinks.node, "inet marks", marks),
    ):
        assert answers(uplinks, policy, place, rows) == wanted(place, rows)


@by_case
@pytest.mark.ways("nftables", "iptables")
def test_a_routing_rule_for_the_frontend_address_does_not_apply_to_replies(
    uplinks: Uplinks, policy: str, place: str
) -> None:
    """A reply gets that source address only after routing: `ip rule add from ADDRESS` has no effect on it."""
    rows = every([("NodePort", SECOND)], families=["v4"])
    gateway, address = uplinks.second_gateway.v4, uplinks.second_address.v4
    with (
        uplinks.checked_sources(),
        uplinks.reverse_path_filter(uplinks.node, LOOSE),
        uplinks.routes(
            uplinks.node,
            f"{gateway} dev {SECOND} scope link table {TABLE}",
            f"default via {gateway} dev {SECOND} table {TABLE}",
        ),
        uplinks.rules(uplinks.node, f"from {address} lookup {TABLE} priority 1000"),
    ):
        assert answers(uplinks, policy, place, rows, SILENCE) == dict.fromkeys(rows, SILENT)
