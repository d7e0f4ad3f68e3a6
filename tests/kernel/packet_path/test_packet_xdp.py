"""The XDP program: it forwards packets with the same bytes as the ingress program, and passes all others."""

import dataclasses
import itertools
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scapy.layers.inet import IP, IPOption_NOP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment, IPv6ExtHdrHopByHop
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path.conversation import NEXT, answer, established, request
from tests.kernel.packet_path.every_service import serve_every_kind, targets_of
from tests.kernel.packet_path.served import TARGETS, TCP, UDP, families, serve
from tests.support import headers, random_packets, xdp_path
from tests.support.bpf_place import HASH, bpf_place, create_map
from tests.support.packet_path import REDIRECT, Outcome, PacketPath, packet_path
from tests.support.packets import THERE, V4, V6, Places, become, ping
from tests.support.random_packets import RandomPackets
from tests.support.xdp_path import PASS, REDIRECTED, SENT, TX, by_xdp, seen_now

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]

protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
_U32 = struct.Struct("=I")


@pytest.fixture(scope="module")
def _path() -> Iterator[PacketPath]:
    with bpf_place() as place, packet_path(place) as made:
        xdp_path.add_gateways()
        yield made


@pytest.fixture
def path(_path: PacketPath) -> PacketPath:
    xdp_path.start_over(_path)
    return _path


@dataclasses.dataclass
class Flow:
    """An established flow to an endpoint on another node. `got`: the first packet, as the endpoint got it."""

    path: PacketPath
    at: Places
    protocol: Protocol
    got: Outcome

    def request(self, **fields: Any) -> Packet:
        """A packet of the client that continues the flow."""
        return request(self.at, self.protocol, **_more(self.protocol), **fields)

    def reply(self, **fields: Any) -> Packet:
        """A packet of the endpoint that continues the flow."""
        return answer(self.got, **_more(self.protocol), **fields)


def _more(protocol: Protocol) -> dict[str, Any]:
    return {"flags": "PA"} if protocol is TCP else {}


def _flow(path: PacketPath, at: Places, protocol: Protocol = TCP, endpoint: str = "") -> Flow:
    serve(path, at, endpoint or at.there)
    got = established(path, at, protocol=protocol)
    path.counted()
    return Flow(path, at, protocol, got)


def _is_forwarded_as_by_tc(path: PacketPath, packet: Packet | bytes, device: str, verdict: int) -> bytes:
    """Check that the XDP program sends the packet as the ingress program does; return the frame."""
    sent = by_xdp(path, packet, device)
    assert sent.verdict == verdict
    redirected = path.ingress(packet, device)
    assert redirected.verdict == REDIRECT
    assert sent.raw[12:] == redirected.raw[12:]
    assert sent.raw[:12] == SENT
    return sent.raw


def _is_passed(path: PacketPath, packet: Packet | bytes, device: str = "net") -> None:
    passed = by_xdp(path, packet, device)
    assert (passed.verdict, passed.raw) == (PASS, bytes(packet))
    assert "xdp_forwarded" not in path.counted()


@families
@protocols
def test_packets_of_an_established_flow_are_forwarded_as_by_tc(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    flow = _flow(path, at, protocol)
    packet = flow.request()
    sent = _is_forwarded_as_by_tc(path, packet, "net", REDIRECTED)
    arrived = Ether(become(packet, at.masquerade, at.there, destination_port=TARGETS[protocol]))
    assert headers.is_good(sent)
    assert headers.parts(sent).outer.tuple == headers.parts(bytes(arrived)).outer.tuple
    back = _is_forwarded_as_by_tc(path, flow.reply(), "tunnel", REDIRECTED)
    assert headers.is_good(back)
    assert headers.parts(back).outer.tuple == headers.parts(bytes(packet)).outer.tuple.reversed()
    assert path.counted() == {"xdp_forwarded": 2, "redirected": 2}


def test_a_forwarded_packet_is_not_run_again_if_the_second_ends(
    path: PacketPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests failed because such a packet was run twice, and the program counted both runs."""
    flow = _flow(path, V4)
    clock, calls = xdp_path.unit, itertools.count(1)
    monkeypatch.setattr(xdp_path, "unit", lambda: clock() + (next(calls) == 2))
    assert by_xdp(path, flow.request()).verdict == REDIRECTED
    assert path.counted() == {"xdp_forwarded": 1}


@families
def test_a_packet_that_leaves_by_its_own_device_is_sent_back(path: PacketPath, at: Places) -> None:
    serve(path, at, xdp_path.BEYOND[at])
    got = established(path, at, "net")
    flow = Flow(path, at, TCP, got)
    _is_forwarded_as_by_tc(path, flow.request(), "net", TX)
    _is_forwarded_as_by_tc(path, flow.reply(), "net", TX)
    path.set_xdp("net", abi.XDP_SENDS)
    _is_forwarded_as_by_tc(path, flow.request(), "net", REDIRECTED)
    path.counted()
    path.set_xdp("net", 0)
    _is_passed(path, flow.request())


@families
@pytest.mark.parametrize("payload", [0, 1, 7, 512, 1400])
@pytest.mark.parametrize("checksum", [None, 0], ids=["checksum", "none"])
def test_datagrams_of_all_sizes_are_forwarded_as_by_tc(
    path: PacketPath, at: Places, payload: int, checksum: int | None
) -> None:
    flow = _flow(path, at, UDP)
    data = (bytes(range(256)) * 6)[:payload]
    _is_forwarded_as_by_tc(path, flow.request(chksum=checksum, data=data), "net", REDIRECTED)
    _is_forwarded_as_by_tc(path, flow.reply(chksum=checksum, data=data), "tunnel", REDIRECTED)


def _with_partial_checksum(frame: bytes) -> bytes:
    """The frame as its sender leaves it to a device that computes checksums."""
    found = headers.parts(frame).outer
    at = found.l4 + (16 if found.protocol == headers.TCP else 6)
    pseudo = headers.total(found.tuple.source + found.tuple.destination) + found.protocol
    total = (pseudo + found.end - found.l4) % 65535
    return frame[:at] + struct.pack("!H", total or 0xFFFF) + frame[at + 2 :]


@families
@protocols
def test_packets_whose_checksum_is_pending_are_passed(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    flow = _flow(path, at, protocol)
    _is_passed(path, _with_partial_checksum(bytes(flow.request())))
    _is_passed(path, _with_partial_checksum(bytes(flow.reply())), "tunnel")


_Alter = Callable[[Packet], Packet]


def _inserted(packet: Packet, header: Packet) -> Packet:
    """The packet with an IPv6 extension header."""
    copy = packet.copy()
    transport = copy[IPv6].payload
    copy[IPv6].remove_payload()
    del copy[IPv6].nh, copy[IPv6].plen
    made: Packet = copy / header / transport
    return made


def _with_v4(packet: Packet, **fields: Any) -> Packet:
    copy = packet.copy()
    for name, value in fields.items():
        setattr(copy[IP], name, value)
    for name in ("ihl", "len", "chksum"):
        delattr(copy[IP], name)
    return Ether(bytes(copy))


def _with_flags(flags: str) -> _Alter:
    def alter(packet: Packet) -> Packet:
        packet["TCP"].flags = flags
        del packet["TCP"].chksum
        return packet

    return alter


def _to(mac: str) -> _Alter:
    def alter(packet: Packet) -> Packet:
        packet[Ether].dst = mac
        return packet

    return alter


def _tagged(packet: Packet) -> Packet:
    return Ether(src=THERE, dst=packet.dst) / Dot1Q(vlan=5) / packet.payload


def _longer(packet: Packet) -> Packet:
    del packet[IP].len, packet[IP].chksum, packet["TCP"].chksum
    return packet / Raw(bytes(1500))


_ALTERED: dict[str, tuple[Places, _Alter]] = {
    "SYN": (V4, _with_flags("S")),
    "FIN": (V4, _with_flags("FA")),
    "RST": (V6, _with_flags("R")),
    "options": (V4, lambda packet: _with_v4(packet, options=[IPOption_NOP()] * 4)),
    "first fragment": (V4, lambda packet: _with_v4(packet, flags="MF")),
    "later fragment": (V4, lambda packet: _with_v4(packet, frag=3)),
    "expiring TTL": (V4, lambda packet: _with_v4(packet, ttl=1)),
    "extension header": (V6, lambda packet: _inserted(packet, IPv6ExtHdrHopByHop())),
    "fragment header": (V6, lambda packet: _inserted(packet, IPv6ExtHdrFragment(id=5))),
    "frame for another host": (V4, _to("02:00:00:00:00:09")),
    "broadcast": (V6, _to("ff:ff:ff:ff:ff:ff")),
    "VLAN": (V4, _tagged),
    "longer than the MTU": (V4, _longer),
}


@pytest.mark.parametrize("case", _ALTERED)
def test_other_packets_of_the_flow_are_passed_unchanged(path: PacketPath, case: str) -> None:
    at, alter = _ALTERED[case]
    flow = _flow(path, at)
    _is_passed(path, alter(Ether(bytes(flow.request()))))
    assert by_xdp(path, flow.request()).verdict == REDIRECTED


@families
def test_truncated_packets_are_passed_unchanged(path: PacketPath, at: Places) -> None:
    flow = _flow(path, at)
    complete = bytes(flow.request())
    for size in range(14 + (20 if at is V4 else 40), len(complete)):
        _is_passed(path, complete[:size])
    _is_forwarded_as_by_tc(path, complete + b"padding", "net", REDIRECTED)


@families
def test_pings_are_passed(path: PacketPath, at: Places) -> None:
    _flow(path, at)
    _is_passed(path, ping(at.client, at.external))


@families
@protocols
def test_packets_of_half_open_flows_are_passed(path: PacketPath, at: Places, protocol: Protocol) -> None:
    serve(path, at, at.there)
    got = path.ingress(request(at, protocol))
    flow = Flow(path, at, protocol, got)
    path.counted()
    _is_passed(path, flow.request())
    _is_passed(path, flow.reply(), "tunnel")


@families
@protocols
def test_the_first_packet_of_each_second_is_passed_in_both_directions(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """tc refreshes the entries, and asks the kernel to verify the neighbor."""
    flow = _flow(path, at, protocol)
    path.age(1)
    for packet, device in ((flow.request(), "net"), (flow.reply(), "tunnel")):
        assert path.xdp(packet, device).verdict == PASS
        assert path.ingress(packet, device).verdict == REDIRECT


@families
@protocols
def test_flows_through_the_stack_are_passed(path: PacketPath, at: Places, protocol: Protocol) -> None:
    """Without --ebpf-redirect, and with an endpoint on this node."""
    path.set_node(0)
    flow = _flow(path, at, protocol)
    _is_passed(path, flow.request())
    _is_passed(path, flow.reply(), "tunnel")
    path.set_node(abi.NODE_REDIRECT)
    path.forget_flows()
    _is_passed(path, _flow(path, at, protocol, at.here).request())


@families
def test_datagrams_are_passed_after_the_endpoint_or_the_frontend_was_removed(
    path: PacketPath, at: Places
) -> None:
    """tc then selects another endpoint, or none."""
    flow = _flow(path, at, UDP)
    packet = flow.request()
    assert by_xdp(path, packet).verdict == REDIRECTED
    serve(path, at, xdp_path.BEYOND[at])
    path.counted()
    _is_passed(path, packet)
    serve(path, at, at.there)
    path.serve_nothing()
    _is_passed(path, packet)


@families
def test_packets_without_a_known_neighbor_are_passed(path: PacketPath, at: Places) -> None:
    flow = _flow(path, at)
    with xdp_path.unknown_neighbor(at, "tunnel"):
        _is_passed(path, flow.request())
    assert by_xdp(path, flow.request()).verdict == REDIRECTED


@families
def test_packets_are_passed_if_the_output_device_cannot_send_them(path: PacketPath, at: Places) -> None:
    flow = _flow(path, at)
    path.set_xdp("tunnel", abi.XDP_SENDS_BACK)
    _is_passed(path, flow.request())
    path.maps["xdp_devices"].delete(_U32.pack(path.indices["tunnel"]))
    _is_passed(path, flow.request())
    path.set_xdp("tunnel")
    path.maps["xdp_devices"].delete(_U32.pack(path.indices["net"]))
    _is_passed(path, flow.request())


@families
def test_replies_are_passed_while_a_previous_map_may_have_their_flow(path: PacketPath, at: Places) -> None:
    """Only tc copies entries of the previous map."""
    flow = _flow(path, at)
    previous = create_map(HASH, abi.FLOW_KEY.size, abi.REPLY.size, 4096)
    path.maps["previous_replies"].update(bytes(4), _U32.pack(previous.fd))
    try:
        assert by_xdp(path, flow.reply(), "tunnel").verdict == REDIRECTED
        path.counted()
        for key in path.replies():
            path.maps["replies"].delete(key)
        _is_passed(path, flow.reply(), "tunnel")
    finally:
        path.maps["previous_replies"].delete(bytes(4))
        previous.close()


@families
@pytest.mark.parametrize("side", ["client", "endpoint"])
def test_a_connection_ends_by_the_sequence_numbers_that_the_xdp_program_saw(
    path: PacketPath, at: Places, side: str
) -> None:
    """A FIN counts only if it follows the last segment."""
    flow = _flow(path, at)
    by_client = side == "client"
    for far in range(NEXT, NEXT + (1 << 20), 100_000):
        sent, acknowledged = (far, NEXT) if by_client else (NEXT, far)
        assert by_xdp(path, flow.request(seq=sent, ack=acknowledged)).verdict == REDIRECTED
        assert by_xdp(path, flow.reply(seq=acknowledged, ack=sent), "tunnel").verdict == REDIRECTED
    if by_client:
        path.ingress(request(at, TCP, flags="FA", seq=far, ack=NEXT))
    else:
        path.ingress(answer(flow.got, flags="FA", seq=far, ack=NEXT), "tunnel")
    closed = abi.FLOW_CLIENT_FIN if by_client else abi.FLOW_ENDPOINT_FIN
    flags = {entry.value["flags"] for entry in (*path.flows().values(), *path.replies().values())}
    assert all(each & closed for each in flags), flags


@families
@pytest.mark.parametrize("side", ["client", "endpoint"])
def test_a_segment_that_does_not_follow_the_last_one_is_left_to_tc(
    path: PacketPath, at: Places, side: str
) -> None:
    """To record it, the entry of the other side is needed."""
    flow = _flow(path, at)
    far = NEXT + (1 << 20)
    if side == "client":
        _is_passed(path, flow.request(seq=far))
    else:
        _is_passed(path, flow.reply(seq=far), "tunnel")


@families
def test_traffic_is_counted_as_by_tc(path: PacketPath, at: Places) -> None:
    flow = _flow(path, at)

    def counted() -> list[int]:
        """The sums of all CPUs: this process may be moved to another one between two packets."""
        parts = (value for _, value in path.maps["traffic"].items())
        rows = (row for part in parts for row in struct.iter_unpack("=5Q", part))
        return [sum(column) for column in zip(*rows, strict=True)]

    def growth(send: Callable[[Packet, str], Outcome]) -> tuple[list[int], list[int]]:
        before = counted()
        verdicts = [send(flow.request(), "net").verdict, send(flow.reply(), "tunnel").verdict]
        return [after - earlier for after, earlier in zip(counted(), before, strict=True)], verdicts

    by_tc, verdicts = growth(path.ingress)
    assert any(by_tc)
    assert verdicts == [REDIRECT] * 2
    of_xdp = seen_now(path, lambda: growth(path.xdp), lambda result: PASS in result[1])
    assert of_xdp == (by_tc, [REDIRECTED] * 2)


_BATCH = 500
"""Random packets between two refreshes of all flows."""
_FORGET = 100_000
"""Random packets after which all flows are deleted."""
_POOL = 2048
"""Forwarded packets to derive others from."""
_SHARE = 20
"""One in this number of packets of the normal run."""


class _Frames:
    """Random packets. Half of them differ in up to two bits from packets that the program has forwarded."""

    def __init__(self, packets: RandomPackets, forwarded: list[bytes]) -> None:
        self.packets = packets
        self._chance = random.Random(7)
        self._forwarded = forwarded

    def make(self) -> bytes:
        if self._chance.random() < 0.5:
            return self.packets.make()
        frame = bytearray(self._chance.choice(self._forwarded))
        for _ in range(self._chance.randrange(3)):
            frame[self._chance.randrange(len(frame))] ^= 1 << self._chance.randrange(8)
        return bytes(frame)

    def forwarded(self, frame: bytes) -> None:
        if len(self._forwarded) < _POOL:
            self._forwarded.append(frame)
        else:
            self._forwarded[self._chance.randrange(_POOL)] = frame


def test_random_packets_are_forwarded_as_by_tc_or_passed_unchanged(
    path: PacketPath, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each packet runs through the XDP program and then through the ingress program. A failure message has
    the packet."""
    monkeypatch.setattr(random_packets, "CLIENTS", 2)
    monkeypatch.setattr(random_packets, "PORTS", 4)
    # A random packet seldom continues a flow: the first ones to differ from are of known flows.
    flows = [_flow(path, at, protocol) for at in (V4, V6) for protocol in (TCP, UDP)]
    forwarded_first = [bytes(packet) for flow in flows for packet in (flow.request(), flow.reply())]
    packets = RandomPackets(7, *targets_of(serve_every_kind(path)))
    frames = _Frames(packets, forwarded_first)
    most: int = pytestconfig.getoption("packets")
    count = most if most > 1_000_000 else most // _SHARE
    forwarded = 0
    ways = [(device, path.runs_xdp(device).run, path.runs_in(device).run) for device in ("net", "tunnel")]
    for number in range(count):
        if number and not number % _FORGET:
            path.forget_flows()
        if not number % _BATCH:
            xdp_path.establish_all(path)
        frame = frames.make()
        device, xdp, ingress = ways[number & 1]
        verdict, sent = xdp(frame)
        tc_verdict, out = ingress(frame)
        note = f"packet {number}, in by {device}: {frame.hex()}"
        if verdict == PASS:
            assert sent == frame, note
        else:
            forwarded += 1
            frames.forwarded(frame)
            assert (verdict in (TX, REDIRECTED), tc_verdict) == (True, REDIRECT), note
            assert sent[12:] == out[12:], note
            assert sent[:12] == SENT, note
        if tc_verdict == REDIRECT and out[12:] != frame[12:]:
            packets.remember(bytes(out))
    assert forwarded > count / 20
