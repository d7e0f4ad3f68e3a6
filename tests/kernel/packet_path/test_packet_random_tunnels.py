"""Random packets on nodes with direct server return: what is sent to another node, and what is accepted from
it."""

import random
from collections import Counter

import pytest

from ebpfproxy.model.address import format_address, parse_address
from tests.kernel.packet_path.every_service import serve_every_kind, targets_of
from tests.support import headers
from tests.support.packet_path import MARK_DONE, MARK_RECEIVED, REDIRECT, SHOT, UNSPEC, PacketPath
from tests.support.random_packets import RandomPackets, answer_to

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(0)]

_NODES = ("192.0.2.20", "2001:db8::20")
_TUNNELS = {"10.244.2.5": _NODES[0], "fd00:2::5": _NODES[1]}
_TARGETS = (8080, 5353, 9899)


def _serve(path: PacketPath) -> RandomPackets:
    path.set_node(tunnel_device=999, tunnel_mtu=1406)
    for node, length in zip(_NODES, (32, 128), strict=True):
        path.set_tunnel_source(f"{node}/{length}")
    return RandomPackets(4, *targets_of(serve_every_kind(path, _TUNNELS)))


def _forwarded(frame: bytes) -> bytes:
    """The packet after one more hop (RFC 1624 for the checksum of IPv4)."""
    after = bytearray(frame)
    if frame[12:14] == b"\x86\xdd":
        after[21] = (after[21] - 1) & 0xFF
        return bytes(after)
    after[22] = (after[22] - 1) & 0xFF
    checksum = int.from_bytes(frame[24:26]) + 0x100
    after[24:26] = ((checksum & 0xFFFF) + (checksum >> 16)).to_bytes(2)
    return bytes(after)


def test_a_packet_is_sent_to_another_node_as_it_is_or_treated_as_before(
    path: PacketPath, pytestconfig: pytest.Config
) -> None:
    packets, seen = _serve(path), Counter[str]()
    ingress = path.runs_in("net")
    count = pytestconfig.getoption("packets") // 4
    for number in range(count):
        if number % 20_000 == 19_999:
            path.forget_flows()
        frame = packets.make()
        path_verdict, out = ingress.run(frame)
        raw, mark = bytes(out), ingress.cb
        try:
            if path_verdict == REDIRECT and mark == MARK_DONE and raw == _forwarded(frame):
                seen["sent"] += 1
            elif path_verdict == UNSPEC and raw == frame:
                seen["passed"] += 1
            elif path_verdict == UNSPEC:
                seen["translated"] += 1
                before, after = headers.parts(frame), headers.parts(raw)
                assert headers.defects(raw, after) == headers.defects(frame, before)
                assert after.outer.tuple.destination in _addresses("10.244.1.5", "fd00:1::5", *_TUNNELS)
            elif path_verdict == REDIRECT:
                seen["answered"] += 1
                assert raw[:12] == frame[6:12] + frame[:6]
            else:
                assert path_verdict == SHOT
                seen["dropped"] += 1
        except AssertionError as failure:
            failure.add_note(f"packet {number}: {frame.hex()}")
            raise
    assert all(seen[what] > count / 200 for what in ("sent", "passed", "translated", "answered")), seen
    assert path.counted()["tunneled"] == seen["sent"]


def test_an_accepted_packet_reaches_an_endpoint_of_this_node(
    path: PacketPath, pytestconfig: pytest.Config
) -> None:
    packets, seen, chance = _serve(path), Counter[str](), random.Random(5)
    endpoints = ["10.244.1.5", "fd00:1::5"] * 4 + list(_TUNNELS)
    senders = list(_NODES) * 4 + ["192.0.2.21"]
    here = _addresses("10.244.1.5", "fd00:1::5")
    count = pytestconfig.getoption("packets") // 4
    for number in range(count):
        if number % 20_000 == 19_999:
            path.forget_flows()
        frame, sender = packets.make(), chance.choice(senders)
        got = path.receive(frame, sender, chance.choice(endpoints), chance.choice(_TARGETS))
        if got.verdict == SHOT:
            seen["dropped"] += 1
            continue
        try:
            assert (got.verdict, got.mark) == (REDIRECT, MARK_RECEIVED)
            assert sender in _NODES
            before, after = headers.parts(frame), headers.parts(got.raw)
            assert after.outer.tuple.destination in here, format_address(after.outer.tuple.destination)
            assert headers.defects(got.raw, after) == headers.defects(frame, before)
            if before.inner:
                seen["errors"] += 1
            else:
                seen["received"] += 1
                assert after.outer.tuple.source == before.outer.tuple.source
                if before.outer.has_ports:  # a reply to the client, about which errors arrive
                    packets.remember(answer_to(frame, before.outer))
            assert headers.without_translated_fields(got.raw, after) == headers.without_translated_fields(
                frame, before
            )
        except AssertionError as failure:
            failure.add_note(f"packet {number} of {sender}: {frame.hex()}")
            raise
    assert all(seen[what] > count / 100 for what in ("received", "errors", "dropped")), seen


def _addresses(*texts: str) -> frozenset[bytes]:
    return frozenset(map(parse_address, texts))
