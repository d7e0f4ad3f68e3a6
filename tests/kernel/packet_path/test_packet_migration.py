"""Flows that only the previous maps have, while programs are replaced device by device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path import served
from tests.kernel.packet_path.conversation import answer, error, established, finish, request
from tests.kernel.packet_path.served import CLIENT_PORT, UDP, families, protocols, serve
from tests.support.bpf_place import create_map
from tests.support.packet_path import UNSPEC, Entry, PacketPath
from tests.support.packets import Places

pytestmark = pytest.mark.kernel

HASH = 1  # BPF_MAP_TYPE_HASH
ONLY = bytes(4)  # the key of an array of maps

both_places = pytest.mark.parametrize("towards", ["tunnel", "pod"])


@pytest.fixture
def previous(path: PacketPath) -> Iterator[dict[str, Map]]:
    """The maps of the previous programs, with another size."""
    with contextlib.ExitStack() as stack:
        made = {}
        for name in ("flows", "replies"):
            sizes = abi.FLOW_KEY.size, abi.FLOW.size, 4096
            made[name] = create_map(HASH, *sizes, path.maps[name].shape.flags)
            stack.callback(made[name].close)
            path.maps[f"previous_{name}"].update(ONLY, made[name].fd.to_bytes(4, "little"))
            stack.callback(path.maps[f"previous_{name}"].delete, ONLY)
        yield made


def move_to_previous(path: PacketPath, previous: dict[str, Map]) -> dict[bytes, Entry]:
    """Move all entries to the previous maps."""
    known = path.flows() | path.replies()
    for name, to in previous.items():
        to.update_all(list(path.maps[name].items()))
    path.forget_flows()
    return known


def more(protocol: Protocol) -> dict[str, Any]:
    return {"flags": "PA"} if protocol is served.TCP else {}


@families
@protocols
@both_places
@pytest.mark.parametrize("side", ["client", "endpoint"])
def test_an_established_flow_continues_after_the_first_packet_of_either_side(
    path: PacketPath, previous: dict[str, Map], at: Places, protocol: Protocol, towards: str, side: str
) -> None:
    serve(path, at, at.there if towards == "tunnel" else at.here)
    got = established(path, at, towards, protocol)
    before = move_to_previous(path, previous)
    if side == "client":
        found = path.forward(request(at, protocol, **more(protocol)), "net", towards).packet
        assert (found.payload.dst, found.sport) == (got.packet.payload.dst, got.packet.sport)
    found = path.forward(answer(got, **more(protocol)), towards, "net").packet
    assert (found.payload.src, found.payload.dst, found.dport) == (at.external, at.client, CLIENT_PORT)
    assert (path.flows() | path.replies()).keys() <= before.keys()


@families
@protocols
@both_places
def test_a_half_open_flow_is_established_after_the_migration(
    path: PacketPath, previous: dict[str, Map], at: Places, protocol: Protocol, towards: str
) -> None:
    serve(path, at, at.there if towards == "tunnel" else at.here)
    got = path.forward(request(at, protocol), "net", towards)
    move_to_previous(path, previous)
    found = path.forward(answer(got), towards, "net").packet
    assert (found.payload.src, found.payload.dst, found.dport) == (at.external, at.client, CLIENT_PORT)
    later: dict[str, Any] = {"flags": "A"} if protocol is served.TCP else {}
    found = path.forward(request(at, protocol, **later), "net", towards).packet
    assert (found.payload.dst, found.sport) == (got.packet.payload.dst, got.packet.sport)
    assert {each.value["half_open"] for each in path.flows().values()} == {0}


@families
def test_a_new_connection_from_the_port_of_a_finished_one_keeps_its_endpoint(
    path: PacketPath, previous: dict[str, Map], at: Places
) -> None:
    """The new connection continues at its endpoint, though the previous map has a finished flow with its
    key."""
    serve(path, at, at.there)
    got = established(path, at)
    finish(path, at, got)
    move_to_previous(path, previous)
    serve(path, at, at.here)
    assert path.forward(request(at), "net", "pod").packet.payload.dst == at.here
    assert path.forward(request(at, flags="A"), "net", "pod").packet.payload.dst == at.here


@families
def test_a_udp_flow_of_a_removed_endpoint_gets_another_one_and_keeps_it(
    path: PacketPath, previous: dict[str, Map], at: Places
) -> None:
    serve(path, at, at.there)
    established(path, at, protocol=UDP)
    move_to_previous(path, previous)
    serve(path, at, at.here)
    path.counted()
    for _ in range(3):
        assert path.forward(request(at, UDP), "net", "pod").packet.payload.dst == at.here
    assert path.counted()["packet_new"] == 1


@families
def test_a_port_of_a_flow_in_the_previous_map_is_not_used_again(
    path: PacketPath, previous: dict[str, Map], at: Places
) -> None:
    serve(path, at, at.there)
    first = established(path, at)
    move_to_previous(path, previous)
    other = path.forward(request(at, client=at.router), "net", "tunnel")
    assert other.verdict == UNSPEC
    assert other.packet.sport != first.packet.sport
    assert path.forward(answer(first, flags="PA"), "tunnel", "net").packet.payload.dst == at.client


@families
def test_an_icmp_error_about_a_flow_of_the_previous_map_reaches_the_client(
    path: PacketPath, previous: dict[str, Map], at: Places
) -> None:
    serve(path, at, at.there)
    got = established(path, at)
    move_to_previous(path, previous)
    outcome = path.forward(error("too big", at.router, at.masquerade, got.raw), "tunnel", "net")
    assert (outcome.verdict, outcome.packet.payload.dst) == (UNSPEC, at.client)
