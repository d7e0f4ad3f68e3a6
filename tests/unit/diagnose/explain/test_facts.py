"""Session affinity of the client, and rules of other programs."""

import functools

import pytest

from ebpfproxy.backends.ebpf.inspect.client_view import AffinityRow
from ebpfproxy.backends.firewall_checks import Dropping
from ebpfproxy.diagnose.explain.facts import with_affinity, with_firewall
from ebpfproxy.diagnose.explain.origin import Origin
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import Explanation
from ebpfproxy.model.address import parse_address
from tests.support.build import HERE, endpoint, port, service, slice_of
from tests.unit.diagnose.explain.scene import (
    A_CLIENT,
    A_POD,
    NODE,
    OTHER_POD,
    POD,
    REMOTE_POD,
    THE_NODE,
    explained,
    reasons,
    situation,
    to,
)

OTHER = A_POD._replace(name=OTHER_POD, addresses=(parse_address(OTHER_POD),), cookie=8)
WEB = service("web", affinity=600)
SLICE = slice_of("web", endpoint(REMOTE_POD), endpoint(POD, HERE))
ENDPOINTS = [f"{POD}:8080", f"{REMOTE_POD}:8080"]


def compared(row: AffinityRow, origin: Origin) -> Explanation:
    of = situation(WEB, SLICE)
    return with_affinity(explained(of, origin=origin), of, origin, lambda: [row])


@pytest.mark.parametrize(
    ("origin", "client"),
    [
        (A_POD._replace(cookie=7), POD),
        (A_POD._replace(cookie=7, addresses=()), POD),
        (THE_NODE._replace(cookie=9), "netns 9"),
    ],
)
def test_an_affinity_of_the_client_is_shown(origin: Origin, client: str) -> None:
    row_ = AffinityRow("default/web", client, ENDPOINTS[0], 3.0, 600, 1, 1)
    known = compared(row_, origin)
    (step,) = (step for step in known.steps if step.reason is Reason.AFFINITY_KNOWN)
    assert ENDPOINTS[0] in step.text
    other = compared(row_, OTHER)
    assert Reason.AFFINITY_UNKNOWN in reasons(other)


def test_the_affinity_of_a_client_outside_is_that_of_its_address() -> None:
    row_ = AffinityRow("default/web", "198.51.100.1", ENDPOINTS[1], 3.0, 600, 1, 1)
    assert Reason.AFFINITY_KNOWN in reasons(compared(row_, A_CLIENT))


@pytest.mark.parametrize(
    ("origin", "target", "is_named"),
    [(A_CLIENT, POD, True), (A_CLIENT, NODE, False), (A_POD, POD, False)],
    ids=["outside", "to a process of the node", "pod"],
)
def test_rules_that_drop_forwarded_packets_are_named(origin: Origin, target: str, is_named: bool) -> None:
    web = service("web", port(80, node_port=30080))
    of = situation(web, slice_of("web", endpoint(target, HERE)))
    before = explained(of, to(NODE, 30080), origin)
    for is_certain in (True, False):
        found = with_firewall(
            before, origin, of, functools.partial(Dropping, "x drops", "accept", is_certain)
        )
        assert (Reason.FORWARD_DROPS in reasons(found)) is is_named
        assert found.works is not (is_named and is_certain)
    assert with_firewall(before, origin, of, lambda: None) == before
