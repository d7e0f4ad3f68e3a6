"""Random packets: those to no Service leave unchanged, and no packet leaves with a bad checksum."""

import random
from collections import Counter

import pytest
from scapy.layers.inet import TCP
from scapy.layers.l2 import Ether

from ebpfproxy.model.address import (
    Protocol,
    family,
    is_unspecified,
    parse_address,
)
from tests.kernel.packet_path.every_service import serve_every_kind, targets_of
from tests.support import headers, packets
from tests.support.conversations import End
from tests.support.packet_judge import FrontendKey, Judge, Offer
from tests.support.packet_path import (
    DEVICES,
    NODE_V4,
    NODE_V6,
    REDIRECT,
    TIMEOUTS,
    UNSPEC,
    PacketPath,
)
from tests.support.packets import become, ip
from tests.support.random_packets import RandomPackets
from tests.support.victims import Victims

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]

_ENOUGH = 1_000_000
"""Packets after which all flows are deleted, before the map has to evict any. Other tests cover evictions."""
_PAUSE = 50_000
"""Packets after which half of all flows are aged so that most of them have expired."""
_SERVICE_CIDRS = "10.200.7.7/32", "10.3.7.7/32", "fd00:200::7/128", "fd00:3::7/128"
"""No packet has these addresses, but the network around them contains those of most packets."""
_LONG = TIMEOUTS["udp"] + 10  # seconds
_ETHERNET = bytes.fromhex(packets.HERE.replace(":", ""))


class _Run:
    """Packets through ingress and egress, as a router forwards them."""

    def __init__(self, path: PacketPath, seed: int) -> None:
        self.offers = offers = serve_every_kind(path)
        path.set_service_cidrs(*_SERVICE_CIDRS)
        self.path = path
        self.packets = RandomPackets(seed, *targets_of(offers))
        self.chance = random.Random(seed)
        at = frozenset(map(parse_address, (NODE_V4, NODE_V6)))
        devices = {name: frozenset(map(parse_address, side[:2])) for name, side in DEVICES.items()}
        self.judge = Judge(offers, at, devices)
        self.verdicts: Counter[str] = Counter()
        self._done = 0

    def send(self, count: int) -> None:
        make, chance = self.packets.make, self.chance.random
        ways = [(came_in, self.path.runs_in(came_in).run, to, self.path.runs_out(to, came_in).run)
                for came_in in ("net", "pod") for to in ("net", "tunnel", "pod")]  # fmt: skip
        of_node = self.path.runs_out("net", "").run
        before, self._done = self._done, self._done + count
        for number in range(before, self._done):
            if not number % _PAUSE:
                self.path.age(_LONG)
            frame = make()
            way = ways[int(chance() * 6)]
            came_in, ingress, to, egress = way
            try:
                verdict, out = ingress(frame)
                if verdict == UNSPEC and out == frame:
                    verdict, out = egress(frame)
                    if verdict == UNSPEC and out == frame:
                        if not number & 7 and frame.startswith(
                            _ETHERNET
                        ):  # a frame for another host is not host-originated
                            verdict, out = of_node(frame)
                            if verdict == REDIRECT:  # a ping that is answered only for the node
                                self.judge.egress(frame, "net", verdict, bytes(out))
                                continue
                            assert verdict == UNSPEC, "a verdict for a host-originated packet"
                            assert out == frame, "a host-originated packet was changed"
                        continue
                    self.judge.egress(frame, to, verdict, bytes(out))
                else:
                    self._follow(frame, came_in, to, verdict, bytes(out))
            except AssertionError as failure:
                failure.add_note(f"packet {number}, in by {came_in}, out by {to}: {frame.hex()}")
                raise

    def _follow(self, frame: bytes, came_in: str, to: str, verdict: int, out: bytes) -> None:
        """Judge a packet that ingress changed, and its egress."""
        self.judge.ingress(frame, verdict, out)
        mark = self.path.runs_in(came_in).cb
        if verdict != UNSPEC:
            return
        verdict, left = self.path.runs_out(to, came_in, mark).run(out)
        if verdict != UNSPEC or left != out:
            self.judge.egress(out, to, verdict, bytes(left))
        if left != out or self.chance.random() < 0.1:
            self.packets.remember(bytes(left))


def test_packets_to_no_service_are_unchanged_and_all_checksums_are_right(
    path: PacketPath, pytestconfig: pytest.Config
) -> None:
    """Each packet goes through ingress, and then through egress. A failure message has the packet."""
    run = _Run(path, seed=1)
    left = pytestconfig.getoption("packets")
    while left:
        count = min(left, _ENOUGH)
        run.send(count)
        left -= count
        path.forget_flows()
        run.judge.forget()
    judged, most = (
        run.judge.judged,
        ("opened", "translated at ingress", "translated at egress", "ICMP errors"),
    )
    assert all(judged[what] > pytestconfig.getoption("packets") / 200 for what in most), judged
    assert all(judged[what] for what in ("refused", "dropped", "later fragments")), judged


_VICTIMS_EVERY = 4
"""One of this number of packets is an attack on a victim."""
_CHECK = 5_000
"""Packets between two checks of the victims' flows."""


def _victims(path: PacketPath, offers: dict[FrontendKey, Offer]) -> Victims:
    """Victims for each frontend of both families that has two endpoints."""
    nodes = {family(address): address for address in map(parse_address, (NODE_V4, NODE_V6))}
    frontends = [
        (Protocol(protocol), End(nodes[family(address)] if is_unspecified(address) else address, number))
        for (address, number, protocol), offer in offers.items()
        if len(offer.endpoints) > 1 and protocol != Protocol.SCTP
    ]
    return Victims(path, 1, frontends)


def test_no_flow_of_a_victim_ends_among_random_packets(path: PacketPath, pytestconfig: pytest.Config) -> None:
    """The attacks are resets, SYNs, FINs and ICMP errors with the addresses of either end of a flow."""
    run = _Run(path, seed=1)
    victims = _victims(path, run.offers)
    left = pytestconfig.getoption("packets") // _VICTIMS_EVERY
    while left:
        victims.open()
        count = min(left, _ENOUGH // 2)
        for _ in range(0, count, _CHECK):
            run.send(_CHECK - _CHECK // _VICTIMS_EVERY)
            for _ in range(_CHECK // _VICTIMS_EVERY):
                victims.attack()
            victims.check()
        left -= count
        path.forget_flows()
        run.judge.forget()
    assert len(victims.seen) > 20, victims.seen


def test_the_checksum_judge_agrees_with_scapy(path: PacketPath) -> None:
    """A checksum that is right for scapy is right for tests/support/headers.py, and every flipped bit in the
    covered data makes it wrong."""
    chance = random.Random(1)
    packets = RandomPackets(1, *targets_of(serve_every_kind(path)))
    for _ in range(500):
        frame = packets.for_service()
        parsed = Ether(frame)
        for name in ("IP", "TCP", "UDP"):
            if name in parsed and parsed[name].chksum:
                del parsed[name].chksum
        assert bytes(parsed) == frame
        assert headers.is_good(frame)
        found = headers.parts(frame)
        sums = headers.defects(frame, found)
        if len(sums) == 2:
            at = chance.randrange(found.outer.l4 + 8, found.outer.end) if found.outer.protocol == 6 else -1
            broken = bytearray(frame)
            broken[at] ^= 1 << chance.randrange(8)
            assert not headers.is_good(bytes(broken))


def test_the_judge_finds_wrong_packets(path: PacketPath) -> None:
    """A changed packet without a Service, a wrong checksum, and an endpoint of another Service."""
    judge = _Run(path, seed=1).judge
    syn = ip("198.51.100.7", "10.96.0.10") / TCP(sport=1000, dport=80)
    for wrong in (
        become(syn, destination="10.244.1.5", destination_port=8081),
        become(syn, "198.51.100.8", "10.244.1.5", destination_port=8080),
        become(syn, destination="10.244.1.5", destination_port=8080)[:-1] + b"x",
        become(syn, destination="10.244.1.5", destination_port=8080) + b"x",
    ):
        with pytest.raises(AssertionError):
            judge.ingress(bytes(syn), UNSPEC, wrong)
    judge.ingress(bytes(syn), UNSPEC, become(syn, destination="10.244.1.5", destination_port=8080))
    nobodys = ip("198.51.100.7", "10.96.0.10") / TCP(sport=1000, dport=81)
    with pytest.raises(AssertionError):
        judge.ingress(bytes(nobodys), UNSPEC, become(nobodys, destination="10.244.1.5"))
    with pytest.raises(AssertionError):
        judge.egress(bytes(nobodys), "net", UNSPEC, become(nobodys, "10.96.0.10"))
