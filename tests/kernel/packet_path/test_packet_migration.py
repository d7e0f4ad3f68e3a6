"""Flows that only the previous maps know, while programs are replaced device by device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path import served
from tests.kernel.packet_path.conversation import answer, error, established, finish, request
from tests.kernel.packet_path.served import CLIENT_PORT, UDP, families, serve, translatable
from tests.support.bpf_place import create_map
from tests.support.packet_path import UNSPEC, Entry, PacketPath
from tests.support.packets import Places

pytestmark = pytest.mark.kernel

HASH = 1  # BPF_MAP_TYPE_HASH
ONLY = bytes(4)  # the key of an array of maps

both_places = pytest.mark.parametrize("towards", ["tunnel", "pod"])


@pytest.fixture
def previous(path: PacketPath) -> Iterator[dict[str, Map]]:
    """Maps of another size, as the previous programs have them."""
    with contextlib.ExitStack() as stack:
        made = {}
        for name in ("flows", "replies"):
            made[name] = create_map(HASH, abi.FLOW_KEY.size, abi.FLOW.size, 4096)
            stack.callback(made[name].close)
            path.maps[f"previous_{name}"].update(ONLY, made[name].fd.to_bytes(4, "little"))
            stack.callback(path.maps[f"previous_{name}"].delete, ONLY)
        yield made


def leave(path: PacketPath, previous: dict[str, Map]) -> dict[bytes, Entry]:
    """As if the previous maps alone had all entries."""
    known = path.flows() | path.replies()
    for name, to in previous.items():
        to.update_all(list(path.maps[name].items()))
    path.forget_flows()
    return known


def more(protocol: Protocol) -> dict[str, Any]:
    return {"flags": "PA"} if protocol is served.TCP else {}


@families
@translatable
@both_places
@pytest.mark.parametrize("side", ["client", "endpoint"])
def test_an_established_flow_goes_on_whoever_sends_first(
    path: PacketPath, previous: dict[str, Map], at: Places, protocol: Protocol, towards: str, side: str
) -> None:
    serve(path, at, at.there if towards == "tunnel" else at.here)
    got = established(path, at, towards, protocol)
    before = leave(path, previous)
    if side == "client":
        found = path.forward(request(at, protocol, **more(protocol)), "net", towards).packet
        assert (found.payload.dst, found.sport) == (got.packet.payload.dst, got.packet.sport)
    found = path.forward(answer(got, **more(protocol)), towards, "net").packet
    assert (found.payload.src, found.payload.dst, found.dport) == (at.external, at.client, CLIENT_PORT)
    assert (path.flows() | path.replies()).keys() <= before.keys()


@families
@translatable
@both_places
def test_a_half_open_flow_goes_on(
    path: PacketPath, previous: dict[str, Map], at: Places, protocol: Protocol, towards: str
) -> None:
    serve(path, at, at.there if towards == "tunnel" else at.here)
    got = path.forward(request(at, protocol), "net", towards)
    leave(path, previous)
    found = path.forward(answer(got), towards, "net").packet
    assert (found.payload.src, found.payload.dst, found.dport) == (at.external, at.client, CLIENT_PORT)
    later: dict[str, Any] = {"flags": "A"} if protocol is served.TCP else {}
    found = path.forward(request(at, protocol, **later), "net", towards).packet
    assert (found.payload.dst, found.sport) == (got.packet.payload.dst, got.packet.sport)
    assert {each.value["half_open"] for each in path.flows().values()} == {0}


@families
def test_a_new_connection_from_a_port_whose_last_one_is_finished(
    path: PacketPath, previous: dict[str, Map], at: Places
) -> None:
    """It goes on where it began, though the previous map knows the finished one by the same key."""
    serve(path, at, at.there)
    got = established(path, at)
    finish(path, at, got)
    leave(path, previous)
    serve(path, at, at.here)
    assert path.forward(request(at), "net", "pod").packet.payload.dst == at.here
    assert path.forward(request(at, flags="A"), "net", "pod").packet.payload.dst == at.here


@families
def test_a_datagram_whose_endpoint_is_gone_goes_to_another_and_stays_there(
    path: PacketPath, previous: dict[str, Map], at: Places
) -> None:
    serve(path, at, at.there)
    established(path, at, protocol=UDP)
    leave(path, previous)
    serve(path, at, at.here)
    path.counted()
    for _ in range(3):
        assert path.forward(request(at, UDP), "net", "pod").packet.payload.dst == at.here
    assert path.counted()["packet_new"] == 1


@families
def test_a_port_that_only_the_previous_map_knows_is_given_to_nobody_else(
    path: PacketPath, previous: dict[str, Map], at: Places
) -> None:
    serve(path, at, at.there)
    first = established(path, at)
    leave(path, previous)
    other = path.forward(request(at, client=at.router), "net", "tunnel")
    assert other.verdict == UNSPEC
    assert other.packet.sport != first.packet.sport
    assert path.forward(answer(first, flags="PA"), "tunnel", "net").packet.payload.dst == at.client


@families
def test_an_error_about_a_packet_of_the_previous_programs_reaches_the_client(
    path: PacketPath, previous: dict[str, Map], at: Places
) -> None:
    serve(path, at, at.there)
    got = established(path, at)
    leave(path, previous)
    outcome = path.forward(error("too big", at.router, at.masquerade, got.raw), "tunnel", "net")
    assert (outcome.verdict, outcome.packet.payload.dst) == (UNSPEC, at.client)
