"""Flows in the previous map, which are not migrated yet."""

import contextlib
from collections.abc import Iterator

import pytest

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.flow_state import Flow
from ebpfproxy.kernel.bpf import Map
from tests.kernel.packet_path.conversation import answer, error, established, finish, is_left_alone, request
from tests.kernel.packet_path.served import CLIENT_PORT, UDP, families, serve
from tests.support.bpf_place import create_map
from tests.support.packet_path import UNSPEC, PacketPath
from tests.support.packets import V4, Places

pytestmark = pytest.mark.kernel

LRU_HASH = 9  # BPF_MAP_TYPE_LRU_HASH
FINISHED = abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN
ONLY = bytes(4)  # the key of `former_flows`


@pytest.fixture
def former(path: PacketPath) -> Iterator[Map]:
    """The previous map of flows, of another size."""
    made = create_map(LRU_HASH, abi.FLOW_KEY.size, abi.FLOW.size, 4096)
    path.maps["former_flows"].update(ONLY, made.fd.to_bytes(4, "little"))
    with contextlib.closing(made):
        yield made
    path.maps["former_flows"].delete(ONLY)


def leave(path: PacketPath, former: Map) -> dict[bytes, Flow]:
    """As if all flows were begun by the former programs alone."""
    known = path.flows()
    former.update_all([(key, flow.pack()) for key, flow in known.items()])
    path.forget_flows()
    return known


@families
@pytest.mark.parametrize("side", ["client", "endpoint"])
@pytest.mark.parametrize("towards", ["tunnel", "pod"])
def test_a_connection_goes_on_whoever_sends_first(
    path: PacketPath, former: Map, at: Places, towards: str, side: str
) -> None:
    serve(path, at, at.there if towards == "tunnel" else at.here)
    got = established(path, at, towards)
    before = leave(path, former)
    if side == "client":
        found = path.forward(request(at, flags="PA"), "net", towards).packet
        assert (found.payload.dst, found.sport) == (got.packet.payload.dst, got.packet.sport)
    found = path.forward(answer(got, flags="PA"), towards, "net").packet
    assert (found.payload.src, found.payload.dst, found.dport) == (at.external, at.client, CLIENT_PORT)
    assert set(path.flows()) <= set(before)


@families
@pytest.mark.parametrize("towards", ["tunnel", "pod"])
def test_the_answer_to_a_datagram_comes(path: PacketPath, former: Map, at: Places, towards: str) -> None:
    serve(path, at, at.there if towards == "tunnel" else at.here)
    got = path.forward(request(at, UDP), "net", towards)
    leave(path, former)
    found = path.forward(answer(got), towards, "net").packet
    assert (found.payload.src, found.payload.dst, found.dport) == (at.external, at.client, CLIENT_PORT)


@families
def test_a_datagram_goes_where_the_last_one_went(path: PacketPath, former: Map, at: Places) -> None:
    serve(path, at, at.there, at.here)
    got = path.forward(request(at, UDP), "net", "tunnel")
    ids = {(flow.service_id, flow.endpoint_id) for flow in leave(path, former).values()}
    for _ in range(8):
        found = path.ingress(request(at, UDP), "net").packet
        assert found.payload.dst == got.packet.payload.dst
    assert {(flow.service_id, flow.endpoint_id) for flow in path.flows().values()} == ids


def test_a_datagram_to_a_service_that_is_gone_is_let_go(path: PacketPath, former: Map) -> None:
    """Again and again, though the previous map has its flow."""
    serve(path, V4, V4.there)
    path.forward(request(V4, UDP), "net", "tunnel")
    leave(path, former)
    path.serve_nothing()
    for _ in range(3):
        packet = request(V4, UDP)
        assert is_left_alone(path.ingress(packet, "net"), packet)


@families
def test_a_syn_that_is_sent_again_goes_where_the_first_one_went(
    path: PacketPath, former: Map, at: Places
) -> None:
    serve(path, at, at.there, at.here)
    got = path.ingress(request(at), "net")
    leave(path, former)
    for _ in range(8):
        assert path.ingress(request(at), "net").packet.payload.dst == got.packet.payload.dst


@families
@pytest.mark.parametrize("copied", [abi.FROM_CLIENT, abi.BETWEEN, abi.FROM_ENDPOINT])
def test_a_flow_of_which_only_a_part_was_copied_is_one_flow(
    path: PacketPath, former: Map, at: Places, copied: int
) -> None:
    serve(path, at, at.there)
    got = established(path, at)
    before = leave(path, former)
    path.maps["flows"].update_all([(k, flow.pack()) for k, flow in before.items() if flow.way == copied])
    for _ in range(3):
        found = path.forward(answer(got, flags="PA"), "tunnel", "net").packet
        assert (found.payload.src, found.payload.dst) == (at.external, at.client)
        path.age(2)  # so that each entry is told what is known of the others
        assert path.forward(request(at, flags="PA"), "net", "tunnel").packet.sport == got.packet.sport
        path.age(2)
    finish(path, at, got)
    known = path.flows()
    assert set(known) == set(before)
    assert {flow.flags & FINISHED for flow in known.values()} == {FINISHED}


def test_the_port_of_a_flow_that_goes_on_is_given_to_nobody(path: PacketPath, former: Map) -> None:
    serve(path, V4, V4.there)
    got = established(path, V4)
    leave(path, former)
    other = path.forward(request(V4, client=V4.router), "net", "tunnel")
    assert other.packet.sport != got.packet.sport
    assert path.forward(answer(got, flags="PA"), "tunnel", "net").packet.payload.dst == V4.client


def test_an_error_about_a_flow_reaches_its_client(path: PacketPath, former: Map) -> None:
    serve(path, V4, V4.there)
    got = established(path, V4)
    leave(path, former)
    about = error("port unreachable", V4.there, got.packet.payload.src, got.raw)
    found = path.forward(about, "tunnel", "net")
    assert (found.verdict, found.packet.payload.dst) == (UNSPEC, V4.client)


def test_a_flow_that_is_over_is_not_known(path: PacketPath, former: Map) -> None:
    serve(path, V4, V4.there)
    got = established(path, V4)
    path.set_node(tcp_established=10)
    path.age(60)
    leave(path, former)
    late = answer(got, flags="PA")
    assert is_left_alone(path.ingress(late, "tunnel"), late)


def test_without_a_previous_map_its_flows_are_not_known(path: PacketPath, former: Map) -> None:
    serve(path, V4, V4.there)
    got = established(path, V4)
    leave(path, former)
    path.maps["former_flows"].delete(ONLY)
    late = answer(got, flags="PA")
    assert is_left_alone(path.ingress(late, "tunnel"), late)
    assert path.forward(request(V4), "net", "tunnel").verdict == UNSPEC
