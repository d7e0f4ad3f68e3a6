"""What the map of netfilter's flows learns of real ones, in network namespaces of the test's own."""

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
    """A node that sends the Service's address to the first pod, and masquerades whatever goes to pods."""
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
        yield build_maps(place, _SIZES, "v1-masks")


class Noted(NetfilterFlows):
    """Whether the programs look there, and what they would have found when that changed."""

    def __init__(self, folder: Path) -> None:
        self.map = Map.pinned(folder / "netfilter_flows")
        self.noted: list[tuple[bool, int]] = []
        super().__init__(folder, lambda present: self.noted.append((present, len(list(self.map.items())))))

    def close(self) -> None:
        super().close()
        self.map.close()


@pytest.fixture
def flows(folder: Path) -> Iterator[Noted]:
    with contextlib.closing(Noted(folder)) as opened:
        yield opened
        for key, _ in list(opened.map.items()):
            opened.map.delete(key)


def never(worked: float) -> bool:
    return False


def test_a_connection_to_a_service_is_known_as_its_endpoint_sees_it_until_it_ends(
    testbed: Testbed, flows: Noted
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
    # Programs look before there is something, and until there is nothing.
    assert flows.noted == [(False, 0), (True, 0), (False, 0)]


def test_the_programs_look_on_while_some_are_left(testbed: Testbed, flows: Noted, folder: Path) -> None:
    vip = testbed.at.vip
    with testbed.pod(0) as server, contextlib.ExitStack() as clients:
        for _ in range(2):
            answers(clients.enter_context(testbed.client_socket(testbed.client, vip)), server)
        with testbed.node.entered():
            assert flows.learn() == 2
            conntrack.delete(next(conntrack.masqueraded()))
            assert flows.forget(never) == 1
            assert flows.noted == [(False, 0), (True, 0)]
            with contextlib.closing(Noted(folder)) as next_agent:
                assert next_agent.noted == [(True, 1)]


def test_a_walk_that_is_ended_early_does_not_say_that_nothing_is_left(testbed: Testbed, flows: Noted) -> None:
    with testbed.pod(0) as server, testbed.client_socket(testbed.client, testbed.at.vip) as client:
        answers(client, server)
        with testbed.node.entered():
            flows.learn()
            conntrack.delete(next(conntrack.masqueraded()))
            assert flows.forget(lambda worked: True) == 1
    assert flows.noted == [(False, 0), (True, 0)]


def test_what_reaches_the_address_that_its_client_dialed_is_of_no_service(
    testbed: Testbed, flows: Noted
) -> None:
    with (
        testbed.pod(0) as server,
        testbed.client_socket(testbed.client, testbed.at.pods[0], TARGET) as client,
    ):
        answers(client, server)
        with testbed.node.entered():
            assert [flow.is_snated for flow in conntrack.masqueraded()] == [True]
            assert flows.learn() == 0
    assert flows.noted == [(False, 0)]


def test_without_any_tracked_connection_nothing_is_asked(
    testbed: Testbed, flows: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since to ask has the kernel load connection tracking."""
    monkeypatch.setattr(netlink, "dump", lambda *_: pytest.fail("it was asked"))
    with testbed.node.entered():
        assert flows.learn() == 0


def known(flows: Map) -> list[tuple[str, int, str, int, Protocol]]:
    """Who sends to whom."""
    found = []
    for key, _ in flows.items():
        source, to, source_port, port, protocol, side, _ = abi.FLOW_KEY.unpack(key)
        assert side == abi.AT_INGRESS
        found.append(
            (format_address(source), ntohs(source_port), format_address(to), ntohs(port), Protocol(protocol))
        )
    return found
