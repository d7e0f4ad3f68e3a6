"""Source ports for the masquerade: every free port between the node's address and an endpoint can be used."""

import dataclasses
import random
import time
from collections.abc import Iterator

import pytest

from ebpfproxy.model.address import Address, Protocol, parse_address
from tests.kernel.cluster import eventually
from tests.kernel.packet_path.conversation import SEARCHES
from tests.kernel.packet_path.served import PORTS, TCP, UDP, serve
from tests.support.bpf_place import bpf_place
from tests.support.conversations import Conversation, End
from tests.support.packet_path import SIZES, UNSPEC, PacketPath, packet_path
from tests.support.packets import V4, V6, Places

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

FIRST_PORT = 1024
ALL_PORTS = range(FIRST_PORT, 65536)
CLOSED = 200
"""The number of flows that end when no port is left."""
SAMPLE = 500
"""The number of flows that are checked at the end."""


@pytest.fixture(scope="module")
def _large() -> Iterator[PacketPath]:
    """Maps with room for a flow for each port."""
    with (
        bpf_place() as place,
        packet_path(place, dataclasses.replace(SIZES, flows=4 * len(ALL_PORTS))) as made,
    ):
        yield made


@pytest.fixture
def path(_large: PacketPath) -> PacketPath:
    _large.start_over()
    return _large


def _clients(at: Places, count: int) -> Iterator[End]:
    """That many different clients with random ports, most of which another client already uses."""
    chance = random.Random(1)
    first = parse_address("198.18.0.0" if at is V4 else "2001:2::")
    for number in range(count):
        address = Address(first[:-2] + number.to_bytes(2))
        yield End(address, chance.choice(ALL_PORTS))


def _opens(flow: Conversation) -> bool:
    return any(flow.open() for _ in range(SEARCHES))


@pytest.mark.parametrize(
    ("at", "protocol"),
    [pytest.param(V4, TCP, id="v4-tcp"), pytest.param(V6, UDP, id="v6-udp", marks=pytest.mark.long)],
)
def test_every_port_can_be_used_and_one_more_flow_is_counted(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """Established flows of different clients to one endpoint on another node."""
    serve(path, at, at.there)
    frontend = End(parse_address(at.external), PORTS[protocol])
    *clients, more = _clients(at, len(ALL_PORTS) + 1)
    path.counted()
    began = time.monotonic()
    flows = [Conversation(path, protocol, client, frontend, "tunnel") for client in clients]
    lost = next((number for number, flow in enumerate(flows) if not _opens(flow)), None)
    print(f"{len(flows)} flows in {time.monotonic() - began:.1f} s")
    assert lost is None, f"no port was found when {lost} were taken"
    assert {flow.seen.port for flow in flows if flow.seen} == set(ALL_PORTS)
    path.counted()

    assert not _opens(Conversation(path, protocol, more, frontend, "tunnel"))
    assert path.counted()["ports_exhausted"] == SEARCHES
    chance = random.Random(2)
    assert all(flow.exchange() for flow in chance.sample(flows, SAMPLE))

    path.set_node(tcp_fin=1, udp_stream=1)
    if protocol is TCP:
        ended, kept = flows[:CLOSED], flows[CLOSED:]
        for flow in ended:
            flow.close()
    else:
        ended, kept = flows, []
    free = {flow.seen.port for flow in ended if flow.seen}
    again = Conversation(path, protocol, more, frontend, "tunnel")

    def has_a_port() -> bool:
        return again.begin().verdict == UNSPEC

    # The programs find them without an agent, which would remove these flows.
    eventually(has_a_port, "the ports of flows that have ended are free", 20.0)
    assert again.seen
    assert again.seen.port in free
    assert all(flow.exchange() for flow in chance.sample(kept, min(SAMPLE, len(kept))))


@pytest.mark.parametrize(("at", "protocol"), [(V4, TCP), (V6, UDP)], ids=["v4-tcp", "v6-udp"])
def test_the_ports_of_each_endpoint_are_independent(path: PacketPath, at: Places, protocol: Protocol) -> None:
    """A port is used between the node's address and one endpoint only: 200 clients with the same port keep it
    if each one has a different endpoint."""
    network = "10.244.2." if at is V4 else "fd00:2::"
    seen = []
    for number in range(1, 201):
        serve(path, at, f"{network}{number:x}" if at is V6 else f"{network}{number}")
        client = End(parse_address(f"198.18.0.{number}" if at is V4 else f"2001:2::{number:x}"), 40000)
        flow = Conversation(path, protocol, client, End(parse_address(at.external), PORTS[protocol]))
        assert flow.open()
        seen.append(flow)
    assert {flow.seen.port for flow in seen if flow.seen} == {40000}
    assert len({flow.endpoint for flow in seen}) == len(seen)
