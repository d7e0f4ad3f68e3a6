"""The comparison of an explanation with the tables of mode ebpf."""

import dataclasses
import functools
from collections.abc import Sequence

import pytest

from ebpfproxy.backends.ebpf.inspect.client_view import AffinityRow
from ebpfproxy.backends.ebpf.inspect.device_view import DeviceRow
from ebpfproxy.backends.ebpf.inspect.view import ServiceRow
from ebpfproxy.backends.firewall_checks import Dropping
from ebpfproxy.diagnose.explain.facts import with_firewall, with_tables
from ebpfproxy.diagnose.explain.origin import Origin
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import Destination, Explanation
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.model.address import parse_address
from tests.support.build import HERE, endpoint, port, service, slice_of
from tests.unit.diagnose.explain.scene import (
    A_CLIENT,
    A_POD,
    CLUSTER_IP,
    NODE,
    OTHER_POD,
    POD,
    REMOTE_POD,
    THE_NODE,
    explained,
    ping,
    reasons,
    situation,
    to,
)

OTHER = A_POD._replace(name=OTHER_POD, addresses=(parse_address(OTHER_POD),), cookie=8)
WEB = service("web", affinity=600)
SLICE = slice_of("web", endpoint(REMOTE_POD), endpoint(POD, HERE))
ENDPOINTS = [f"{POD}:8080", f"{REMOTE_POD}:8080"]
ROW = ServiceRow(
    "default/web",
    "ClusterIP",
    "TCP",
    CLUSTER_IP,
    80,
    ENDPOINTS,
    ENDPOINTS,
    "Cluster",
    600,
    ["reject"],
    1,
    "",
    "",
)
UPLINK = DeviceRow("eth0", 2, "net", "ethernet", [NODE], 5, 6, "none", [])


@dataclasses.dataclass
class Tables:
    """Rows that a test gives."""

    rows: Sequence[ServiceRow] = ()
    affinities: Sequence[AffinityRow] = ()
    uplinks: Sequence[DeviceRow] = (UPLINK,)

    def services(self) -> Sequence[ServiceRow]:
        return self.rows

    def affinity(self) -> Sequence[AffinityRow]:
        return self.affinities

    def devices(self) -> Sequence[DeviceRow]:
        return self.uplinks


def compared(
    tables: Tables,
    destination: Destination | None = None,
    origin: Origin = A_POD,
    of: Situation | None = None,
) -> Explanation:
    of = of or situation(WEB, SLICE)
    return with_tables(explained(of, destination, origin), of, origin, tables)


def row() -> ServiceRow:
    """The row that agrees with the plan, which has DROP as its action because it has endpoints."""
    return ROW._replace(flags=[])


def test_equal_tables_agree() -> None:
    found = compared(Tables([row()]))
    assert not found.disagreements
    assert Reason.AGREES in reasons(found)
    assert found.works


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"service": "default/other"}, "default/other"),
        ({"kind": "ExternalIP"}, "kind ExternalIP"),
        ({"internal": ENDPOINTS[:1]}, f"internal endpoints only in the plan: {ENDPOINTS[1]}"),
        ({"external": [*ENDPOINTS, "10.1.0.99:1"]}, "external endpoints only in the kernel: 10.1.0.99:1"),
        ({"affinity": 0}, "affinity 0 s"),
        ({"flags": ["reject"]}, "no-endpoint action"),
        ({"flags": ["source-ranges"]}, "source ranges"),
    ],
)
def test_a_different_row_disagrees_with_its_key(changed: dict[str, object], expected: str) -> None:
    found = compared(Tables([row()._replace(**changed)]))  # type: ignore[arg-type]
    (difference,) = found.disagreements
    assert difference.startswith(f"services {CLUSTER_IP}:80/TCP: ")
    assert expected in difference
    assert Reason.DISAGREES in reasons(found)


def test_a_missing_row_disagrees() -> None:
    assert compared(Tables()).disagreements == (f"services {CLUSTER_IP}:80/TCP: missing in the kernel",)


def test_a_row_that_the_plan_lacks_disagrees() -> None:
    found = compared(Tables([row()._replace(port=81)]), to(port=81))
    assert found.disagreements == (f"services {CLUSTER_IP}:81/TCP: only in the kernel, for default/web",)


def test_node_ports_of_each_family_are_compared() -> None:
    web = service("web", port(80, node_port=30080))
    of = situation(web, SLICE)
    node_port = row()._replace(kind="NodePort", address="*", port=30080, affinity=0)
    other_family = node_port._replace(internal=["[fd01::1]:8080"], external=["[fd01::1]:8080"])
    found = compared(Tables([other_family, node_port]), to(NODE, 30080), of=of)
    assert not found.disagreements


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
    known = compared(Tables([row()], [row_]), origin=origin)
    (step,) = (step for step in known.steps if step.reason is Reason.AFFINITY_KNOWN)
    assert ENDPOINTS[0] in step.text
    other = compared(Tables([row()], [row_]), origin=OTHER)
    assert Reason.AFFINITY_UNKNOWN in reasons(other)


def test_the_affinity_of_a_client_outside_is_that_of_its_address() -> None:
    row_ = AffinityRow("default/web", "198.51.100.1", ENDPOINTS[1], 3.0, 600, 1, 1)
    assert Reason.AFFINITY_KNOWN in reasons(compared(Tables([row()], [row_]), origin=A_CLIENT))


@pytest.mark.parametrize(
    ("uplinks", "expected"),
    [
        ([], "device eth0: no program at ingress"),
        ([UPLINK._replace(ingress=0)], "device eth0: no program at ingress"),
        ([UPLINK._replace(before=["ingress: other"])], "another program runs first: ingress: other"),
    ],
)
def test_a_device_without_a_program_disagrees(uplinks: list[DeviceRow], expected: str) -> None:
    found = compared(Tables([row()], uplinks=uplinks), origin=A_CLIENT)
    (difference,) = found.disagreements
    assert expected in difference
    assert not compared(Tables([row()], uplinks=uplinks), origin=A_POD).disagreements  # a socket hook


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


def test_an_echo_request_is_not_compared() -> None:
    found = compared(Tables(), ping(CLUSTER_IP))
    assert not reasons(found) & {Reason.AGREES, Reason.DISAGREES}
