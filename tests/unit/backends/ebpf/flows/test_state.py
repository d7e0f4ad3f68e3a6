"""The state of a flow, when it is over, and which entries it has."""

import sys
from socket import IPPROTO_SCTP, IPPROTO_TCP, IPPROTO_UDP, htons

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.state import (
    UNIT,
    Flow,
    FlowState,
    FlowTimeouts,
    Oldest,
    address_digest,
    columns,
    flow_key,
    protocols,
    reply_key,
    state,
    timeout,
)
from ebpfproxy.model.address import parse_address
from tests.support.flows import NS, a_flow, seen

TIMEOUTS = FlowTimeouts(
    tcp_established=1000, tcp_close_wait=100, tcp_syn=60, tcp_fin=10, udp=30, udp_stream=180
)
LIVE = abi.FLOW_REPLIED
NONE = bytes(16)


@pytest.mark.parametrize(
    ("protocol", "flags", "expected", "seconds"),
    [
        (IPPROTO_TCP, LIVE, FlowState.ESTABLISHED, 1000),
        (IPPROTO_TCP, abi.FLOW_CLIENT_FIN, FlowState.CLOSE_WAIT, 100),
        (IPPROTO_TCP, LIVE | abi.FLOW_ENDPOINT_FIN, FlowState.CLOSE_WAIT, 100),
        (IPPROTO_TCP, abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN, FlowState.FIN, 10),
        (IPPROTO_TCP, abi.FLOW_RESET, FlowState.FIN, 10),
        (IPPROTO_TCP, LIVE | abi.FLOW_RESET | abi.FLOW_CLIENT_FIN, FlowState.FIN, 10),
        (IPPROTO_UDP, 0, FlowState.UNREPLIED, 180),
        (IPPROTO_UDP, LIVE, FlowState.REPLIED, 180),
        (IPPROTO_SCTP, LIVE | abi.FLOW_MASQUERADE, FlowState.REPLIED, 210),
    ],
)
def test_state_and_timeout_of_established_flows(
    protocol: int, flags: int, expected: FlowState, seconds: int
) -> None:
    assert state(protocol, flags) is expected
    assert timeout(protocol, flags, TIMEOUTS) == seconds


@pytest.mark.parametrize(
    ("protocol", "flags", "expected", "seconds"),
    [
        (IPPROTO_TCP, 0, FlowState.SYN, 60),
        (IPPROTO_TCP, LIVE, FlowState.SYN, 60),
        (IPPROTO_TCP, LIVE | abi.FLOW_RESET, FlowState.FIN, 60),
        (IPPROTO_UDP, 0, FlowState.UNREPLIED, 30),
        (IPPROTO_UDP, LIVE, FlowState.REPLIED, 30),
        (IPPROTO_SCTP, 0, FlowState.UNREPLIED, 30),
    ],
)
def test_state_and_timeout_of_half_open_flows(
    protocol: int, flags: int, expected: FlowState, seconds: int
) -> None:
    assert state(protocol, flags, half_open=True) is expected
    assert timeout(protocol, flags, TIMEOUTS, half_open=True) == seconds


def has_passed(last_seen: int, now: int, seconds: int) -> bool:
    """has_passed() of bpf/flow_half_open.h."""
    units = now - last_seen
    return units > 0 and units << 30 > seconds * NS


@pytest.mark.parametrize("seconds", [0, 1, 30, 180, 86400, 107374])
def test_an_entry_is_over_at_the_same_time_as_in_the_programs(seconds: int) -> None:
    now = 200_000
    limit = Oldest(FlowTimeouts(tcp_established=seconds), now * UNIT + 7)[IPPROTO_TCP, 0, False]
    units = seconds * NS // UNIT
    for last_seen in range(now - units - 2, now - units + 3):
        assert (last_seen < limit) == has_passed(last_seen, now, seconds)


def test_half_open_entries_have_their_own_limits() -> None:
    now = 10_000 * UNIT
    oldest = Oldest(TIMEOUTS, now)
    assert oldest[IPPROTO_TCP, abi.FLOW_RESET, True] == 10_000 - 60 * NS // UNIT
    assert oldest[IPPROTO_UDP, LIVE, True] == 10_000 - 30 * NS // UNIT


def packed_key(source: str, to: str | bytes, source_port: int, port: int, protocol: int, side: int) -> bytes:
    destination = to if isinstance(to, bytes) else parse_address(to)
    ports = htons(source_port), htons(port)
    return abi.FLOW_KEY.pack(parse_address(source), destination, *ports, protocol, side, 0)


def test_the_keys_of_a_flow_that_is_not_masqueraded() -> None:
    flow = a_flow()._replace(reply_port=htons(7777))
    (key, value), (place, reply) = flow.entry(), flow.reply_entry()
    assert key == packed_key("192.0.2.9", "10.96.0.1", 1001, 80, IPPROTO_TCP, abi.AT_INGRESS)
    assert place == packed_key("10.244.1.3", "192.0.2.9", 8080, 7777, IPPROTO_TCP, abi.AT_EGRESS)
    assert reply_key(key, value) == place
    assert flow_key(place, reply) == key


def test_the_reply_of_a_masqueraded_flow_is_found_by_its_port_alone() -> None:
    """The node's stack sees the same reply to another address."""
    flow = a_flow(masquerade="10.0.0.1", protocol=IPPROTO_UDP)
    (key, value), (place, reply) = flow.entry(), flow.reply_entry()
    assert place == packed_key("10.244.1.3", NONE, 8080, 40001, IPPROTO_UDP, abi.MASQUERADED)
    assert (reply_key(key, value), flow_key(place, reply)) == (place, key)


@pytest.mark.parametrize("masquerade", ["", "10.0.0.1"])
def test_a_flow_of_the_node_itself_has_keys_at_egress(masquerade: str) -> None:
    flow = a_flow(flags=abi.FLOW_NODE, masquerade=masquerade)
    key, _ = flow.entry()
    assert key == packed_key("192.0.2.9", "10.96.0.1", 1001, 80, IPPROTO_TCP, abi.AT_EGRESS)
    assert flow_key(*flow.reply_entry()) == key


def test_a_flow_is_unpacked_from_both_entries() -> None:
    flow = seen(a_flow(flags=LIVE, masquerade="10.0.0.1"), client=5 * UNIT, endpoint=9 * UNIT)
    (key, value), (_, reply) = flow.entry(), flow.reply_entry()
    assert Flow.unpack(key, value, reply) == flow
    alone = Flow.unpack(key, value)
    assert alone == flow._replace(endpoint_seen=None, flags=abi.FLOW_MASQUERADE)


@pytest.mark.skipif(sys.byteorder != "little", reason="the words are the machine's own")
@pytest.mark.parametrize(
    ("address", "digest"),
    [("172.18.0.2", 0x4BE01F4A), ("::1", 0x01000000), ("2001:db8::5", 0xEB0589F7), ("::", 0x00000001)],
)
def test_the_digest_of_an_address_equals_that_of_the_programs(address: str, digest: int) -> None:
    """The numbers are those of address_digest() of bpf/flow_key.h, compiled; never 0."""
    assert address_digest(parse_address(address)) == digest


def test_columns_are_the_fields_of_the_struct() -> None:
    flow = a_flow(flags=LIVE, last_seen=12345 * UNIT, masquerade="10.0.0.1")
    some = columns(abi.FLOW, masquerade="16s", reply_port="H", flags="H", last_seen="I")
    assert some.unpack(flow.entry()[1]) == (flow.masquerade, flow.reply_port, abi.FLOW_MASQUERADE, 12345)


def test_the_protocols_of_concatenated_keys() -> None:
    keys = [a_flow(1, protocol).entry()[0] for protocol in (IPPROTO_UDP, IPPROTO_TCP, IPPROTO_SCTP)]
    assert list(protocols(b"".join(keys))) == [IPPROTO_UDP, IPPROTO_TCP, IPPROTO_SCTP]
