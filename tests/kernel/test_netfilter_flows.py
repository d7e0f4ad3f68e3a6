"""The map of netfilter's flows is filled from real conntrack entries, in network namespaces of the test."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from socket import ntohs

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.netfilter_flows import NetfilterFlows
from ebpfproxy.backends.ebpf.maps import MapSizes
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import conntrack, netlink
from ebpfproxy.model.address import Family, Protocol, format_address
from tests.kernel.nat_testbed import DNS, TARGET, UDP, Testbed, answers, end_all_flows
from tests.support.bpf_place import bpf_place, build_maps

pytestmark = pytest.mark.kernel

_SIZES = MapSizes(services=8, slots=16, endpoints=64, affinity=8, sockets=8, flows=64, source_ranges=8)
_MASQUERADE = "ebpfproxy-masquerade"


@pytest.fixture(params=list(Family), ids=lambda of: of.value)
def testbed(request: pytest.FixtureRequest, testbeds: dict[Family, Testbed]) -> Iterator[Testbed]:
    """A node that translates the Service's address to the first pod, and masquerades all traffic to pods."""
    made: Testbed = testbeds[request.param]
    table = f"{made.at.nft} {_MASQUERADE}"
    made.rules(dns=(made.at.vip, DNS, made.at.pods[0]))
    made.nft(
        f"table {table} {{\nchain post {{ type nat hook postrouting priority 100;\n"
        "oifname inside masquerade fully-random\n}\n}\n"
    )
    yield made
    made.nft(f"delete table {table}")
    end_all_flows(made)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with bpf_place() as place:
        yield build_maps(place, _SIZES, "programs-masks")


class RecordedFlows(NetfilterFlows):
    """Records each switch of the lookup in the map: whether it is on, and how many entries the map has."""

    def __init__(self, folder: Path) -> None:
        self.map = Map.pinned(folder / "netfilter_flows")
        self.switches: list[tuple[bool, int]] = []
        super().__init__(folder, lambda present: self.switches.append((present, len(list(self.map.items())))))

    def close(self) -> None:
        super().close()
        self.map.close()


@pytest.fixture
def flows(folder: Path) -> Iterator[RecordedFlows]:
    with contextlib.closing(RecordedFlows(folder)) as opened:
        yield opened
        for key, _ in list(opened.map.items()):
            opened.map.delete(key)


def never(worked: float) -> bool:
    return False


def test_a_masqueraded_connection_is_in_the_map_as_its_endpoint_sees_it_until_it_ends(
    testbed: Testbed, flows: RecordedFlows
) -> None:
    with testbed.pod(0) as server, testbed.client_socket(testbed.client, testbed.at.vip) as client:
        client.send(b"?")
        seen = server.recvfrom(16)[1]
        with testbed.node.entered():
            assert flows.learn() == 1
            assert known(flows.map) == [(testbed.at.pods[0], TARGET, *seen[:2], UDP)]
            assert flows.forget(never) == 0
            (flow,) = conntrack.masqueraded()
            conntrack.delete(flow)
            assert flows.forget(never) == 1
    assert known(flows.map) == []
    # The lookup is on before the first entry is written, and until the last one is deleted.
    assert flows.switches == [(False, 0), (True, 0), (False, 0)]


def test_the_lookup_stays_on_while_entries_are_left(
    testbed: Testbed, flows: RecordedFlows, folder: Path
) -> None:
    vip = testbed.at.vip
    with testbed.pod(0) as server, contextlib.ExitStack() as clients:
        for _ in range(2):
            answers(clients.enter_context(testbed.client_socket(testbed.client, vip)), server)
        with testbed.node.entered():
            assert flows.learn() == 2
            conntrack.delete(next(conntrack.masqueraded()))
            assert flows.forget(never) == 1
            assert flows.switches == [(False, 0), (True, 0)]
            with contextlib.closing(RecordedFlows(folder)) as next_agent:
                assert next_agent.switches == [(True, 1)]


def test_an_aborted_walk_does_not_switch_the_lookup_off(testbed: Testbed, flows: RecordedFlows) -> None:
    with testbed.pod(0) as server, testbed.client_socket(testbed.client, testbed.at.vip) as client:
        answers(client, server)
        with testbed.node.entered():
            flows.learn()
            conntrack.delete(next(conntrack.masqueraded()))
            assert flows.forget(lambda worked: True) == 1
    assert flows.switches == [(False, 0), (True, 0)]


def test_a_connection_without_destination_nat_is_not_learned(testbed: Testbed, flows: RecordedFlows) -> None:
    with (
        testbed.pod(0) as server,
        testbed.client_socket(testbed.client, testbed.at.pods[0], TARGET) as client,
    ):
        answers(client, server)
        with testbed.node.entered():
            assert [flow.is_snated for flow in conntrack.masqueraded()] == [True]
            assert flows.learn() == 0
    assert flows.switches == [(False, 0)]


def test_a_connection_of_the_node_is_learned_and_one_of_others_only_if_it_is_masqueraded(
    testbed: Testbed, flows: RecordedFlows
) -> None:
    """Found with random changes: a new flow got the port of a connection of the node, which then ended."""
    testbed.nft(f"flush table {testbed.at.nft} {_MASQUERADE}")
    with (
        testbed.pod(0) as server,
        testbed.client_socket(testbed.node, testbed.at.vip) as own,
        testbed.client_socket(testbed.client, testbed.at.vip) as other,
    ):
        other.send(b"?")
        server.recvfrom(16)
        own.send(b"?")
        seen = server.recvfrom(16)[1]
        with testbed.node.entered():
            assert flows.learn() == 1
            assert known(flows.map) == [(testbed.at.pods[0], TARGET, *seen[:2], UDP)]


def test_without_tracked_connections_conntrack_is_not_queried(
    testbed: Testbed, flows: RecordedFlows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query would make the kernel load connection tracking."""
    monkeypatch.setattr(netlink, "dump", lambda *_: pytest.fail("conntrack was queried"))
    with testbed.node.entered():
        assert flows.learn() == 0


def known(flows: Map) -> list[tuple[str, int, str, int, Protocol]]:
    """Of each entry: source address and port, destination address and port, protocol."""
    found = []
    for key, _ in flows.items():
        source, to, source_port, port, protocol, side, _ = abi.FLOW_KEY.unpack(key)
        assert side == abi.AT_INGRESS
        found.append(
            (format_address(source), ntohs(source_port), format_address(to), ntohs(port), Protocol(protocol))
        )
    return found
