"""Random packets through real devices, with other programs before and after those of the agent.

Packets to Services never leave untranslated, no packet is lost or loops, and no victim's flow ends.
"""

import contextlib
import json
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf import tcx
from ebpfproxy.linux.netlink import on_link_routes
from ebpfproxy.model.address import Family, Protocol, family, format_address, is_unspecified, parse_address
from tests.kernel.others import HEAD, NEXT, PASS, TAIL, filtered, linked
from tests.kernel.packet_path.conversation import answer, request
from tests.kernel.packet_path.every_service import serve_every_kind, targets_of
from tests.kernel.packet_path.served import families, serve
from tests.support.bpf_place import bpf_place
from tests.support.conversations import End
from tests.support.device_path import Around, DevicePath, Wires, attached, wires
from tests.support.packet_judge import FrontendKey, Offer
from tests.support.packet_path import DEVICES, NODE_V4, NODE_V6, PacketPath, packet_path
from tests.support.packets import Places
from tests.support.random_packets import RandomPackets
from tests.support.victims import Victims
from tests.support.wire_judge import WireJudge

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]

NEIGHBOR = "02:00:00:00:00:33"
OVERWRITTEN = {"mark": 0x0F0F, "tc_index": 0xFFFF, "cb": 0xFFFFFFFF}
AROUND = {
    "tcx": Around(True),
    "tcx, tcx after": Around(True, ((linked, TAIL, PASS, {}),)),
    "tcx, tc after": Around(True, ((filtered, HEAD, PASS, OVERWRITTEN), (filtered, TAIL, PASS, {}))),
    "tcx, tcx around": Around(True, ((linked, HEAD, NEXT, OVERWRITTEN), (linked, TAIL, PASS, OVERWRITTEN))),
    "tcx, tcx came first": Around(True, ((linked, HEAD, PASS, OVERWRITTEN),), came_first=True),
    "tc, tc after": Around(False, ((filtered, TAIL, PASS, OVERWRITTEN),)),
    "tc, tc around": Around(
        False, ((filtered, HEAD, NEXT, OVERWRITTEN), (filtered, TAIL, PASS, OVERWRITTEN))
    ),
    "tc, tc came first": Around(False, ((filtered, HEAD, PASS, {}),), came_first=True),
    "tc, tcx before": Around(False, ((linked, HEAD, NEXT, OVERWRITTEN), (filtered, TAIL, PASS, OVERWRITTEN))),
}
_SHORT = 1_000_000
"""`--packets` of the normal run, of which each layout gets 10,000. In longer runs the layouts share all
packets."""
_BATCH = 32
"""Packets between two checks of the output."""
_ENOUGH = 500_000
"""Packets after which all flows are deleted."""
_CHECK = 2_000
"""Packets between two checks of the victims' flows."""
_RUNS = 4
"""The maximum of program runs per packet through the node: 2, and more during a search for a port."""


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[PacketPath, Wires, Path]]:
    with bpf_place() as made, packet_path(made, at_devices=True) as path, wires() as connected:
        yield path, connected, made.bpffs


class _Node:
    """The node with one layout of programs, and random packets."""

    def __init__(self, path: PacketPath, connected: Wires, seed: int) -> None:
        self.path, self.wires = path, connected
        path.start_over()
        self.offers = serve_every_kind(path)
        self.packets = RandomPackets(seed, *targets_of(self.offers))
        self.chance = random.Random(seed)
        self.judge = WireJudge(
            self.offers,
            frozenset(map(parse_address, (NODE_V4, NODE_V6))),
            {name: frozenset(map(parse_address, side[:2])) for name, side in DEVICES.items()},
        )

    def send(self, count: int) -> None:
        """Send `count` packets by net and by pod."""
        for at in range(0, count, _BATCH):
            for _ in range(min(_BATCH, count - at)):
                raw = self.packets.make()
                self.judge.sent(raw)
                self.wires.send("net" if self.chance.random() < 0.5 else "pod", raw)
            self._judge(passes=1)

    def settle(self) -> None:
        """Await the output of all packets that were sent."""
        self._judge(passes=8)
        assert not self.judge.missing, f"lost: {[raw.hex() for raw in list(self.judge.missing)[:3]]}"

    def _judge(self, passes: int) -> None:
        for got in self.wires.drain(passes):
            try:
                self.judge.out(got)
            except AssertionError as failure:
                failure.add_note(f"out by {got.device}: {got.raw.hex()}")
                raise
            if self.chance.random() < 0.1:
                self.packets.remember(got.raw)

    def runs(self) -> int:
        """How many times the programs ran, on both sides of all devices."""
        values = (value for _, value in self.path.maps["device_packets"].items())
        return sum(sum(struct.unpack(f"={len(value) // 8}Q", value)) for value in values)


def _share(config: pytest.Config) -> int:
    """How many packets go through one layout in one test."""
    packets: int = config.getoption("packets")
    return max(packets // (100 if packets <= _SHORT else 2 * len(AROUND)), _CHECK)


@pytest.fixture(params=AROUND)
def around(request: pytest.FixtureRequest) -> Around:
    found = AROUND[request.param]
    needs_tcx = found.by_tcx or any(way is linked for way, *_ in found.others)
    if needs_tcx and not tcx.is_supported():
        pytest.skip("this kernel has no tcx")
    return found


@pytest.mark.parametrize("redirect", [False, True], ids=["stack", "redirect"])
def test_no_packet_is_missed_or_lost_with_other_programs(
    place: tuple[PacketPath, Wires, Path],
    around: Around,
    redirect: bool,
    pytestconfig: pytest.Config,
) -> None:
    path, connected, pins = place
    node = _Node(path, connected, seed=3)
    path.set_node(abi.NODE_REDIRECT if redirect else 0)
    left = total = _share(pytestconfig)
    with attached(path, pins, around):
        before = node.runs()
        while left:
            count = min(left, _ENOUGH)
            node.send(count)
            node.settle()
            left -= count
            path.forget_flows()
            node.judge.forget()
        runs = node.runs() - before
        assert total < runs < _RUNS * total, "a packet loops, or does not reach the programs"
        assert connected.drain() == []
    judged = node.judge.judged
    assert judged["out"] <= judged["in"], judged
    assert all(judged[what] > total / 200 for what in ("flows opened", "answers", "left as they came")), (
        judged
    )


@contextlib.contextmanager
def on_link(address: str) -> Iterator[None]:
    """Within the block, the address is that of a neighbor at `net` and of a frontend: its route has the
    gateway of on-link frontends."""
    gateway = format_address(on_link_routes.GATEWAYS[Family.IPV6 if ":" in address else Family.IPV4])
    gateway_ethernet = on_link_routes.MAC.hex(":")
    neighbor = f"neigh replace {address} dev net nud permanent lladdr"
    known = [
        each["lladdr"] for each in json.loads(_ip(f"-j neigh show {address} dev net")) if "lladdr" in each
    ]
    undo = f"{neighbor} {known[0]}" if known else f"neigh del {address} dev net"
    _ip(f"neigh add {gateway} lladdr {gateway_ethernet} dev net nud permanent")
    _ip(f"{neighbor} {NEIGHBOR}")
    _ip(f"route add {address} via {gateway} dev net onlink")
    try:
        yield
    finally:
        _ip(f"route del {address} via {gateway} dev net onlink")
        _ip(undo)
        _ip(f"neigh del {gateway} dev net")


def _ip(arguments: str) -> str:
    return subprocess.run(["ip", *arguments.split()], check=True, stdout=subprocess.PIPE, text=True).stdout


@families
def test_replies_reach_a_client_with_the_address_of_an_on_link_frontend(
    place: tuple[PacketPath, Wires, Path], at: Places
) -> None:
    """Redirected replies pass the gateway of its route, which no machine has."""
    path, connected, pins = place
    path.start_over()
    path.set_node(abi.NODE_REDIRECT)
    serve(path, at, at.here)
    node = DevicePath(connected)
    with on_link(at.client), attached(path, pins, Around(tcx.is_supported())):
        got = node.forward(bytes(request(at, Protocol.UDP)), "net", "pod")
        back = node.forward(bytes(answer(got)), "pod", "net").packet
    assert (back.dst, back.payload.src, back.payload.dst) == (NEIGHBOR, at.external, at.client)
    assert path.counted()["redirected"] == 2


@pytest.mark.parametrize("redirect", [False, True], ids=["stack", "redirect"])
def test_no_flow_of_a_victim_ends_with_other_programs(
    place: tuple[PacketPath, Wires, Path],
    around: Around,
    redirect: bool,
    pytestconfig: pytest.Config,
) -> None:
    path, connected, pins = place
    node = _Node(path, connected, seed=4)
    path.set_node(abi.NODE_REDIRECT if redirect else 0)
    left = max(_share(pytestconfig) // 10, _CHECK)
    with attached(path, pins, around):
        victims = Victims(cast(PacketPath, DevicePath(connected)), 1, _frontends(node.offers))
        while left:
            victims.open()
            for _ in range(0, min(left, _ENOUGH), _CHECK):
                node.send(_CHECK * 3 // 4)
                node.settle()
                for _ in range(_CHECK // 4):
                    victims.attack()
                victims.check()
            left -= min(left, _ENOUGH)
            path.forget_flows()
            node.judge.forget()
    assert len(victims.seen) > 20, victims.seen


def _frontends(offers: dict[FrontendKey, Offer]) -> list[tuple[Protocol, End]]:
    """The frontends of TCP and UDP that have two endpoints."""
    nodes = {family(address): address for address in map(parse_address, (NODE_V4, NODE_V6))}
    return [
        (Protocol(protocol), End(nodes[family(address)] if is_unspecified(address) else address, number))
        for (address, number, protocol), offer in offers.items()
        if len(offer.endpoints) > 1 and protocol != Protocol.SCTP
    ]
