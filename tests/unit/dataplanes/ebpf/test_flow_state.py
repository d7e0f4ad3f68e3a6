"""What a flow has come to, when it is over, and which entries it has."""

from socket import IPPROTO_SCTP, IPPROTO_TCP, IPPROTO_UDP, htons

import pytest

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.flow_state import (
    Flow,
    FlowState,
    FlowTimeouts,
    columns,
    keys,
    over_before,
    same_flow,
    state,
    timeout,
)
from ebpfproxy.model.address import parse_address
from tests.support.flows import NS, a_flow

TIMEOUTS = FlowTimeouts(
    tcp_established=1000, tcp_close_wait=100, tcp_syn=60, tcp_fin=10, udp=30, udp_stream=180
)
LIVE = abi.FLOW_REPLIED | abi.FLOW_ESTABLISHED


@pytest.mark.parametrize(
    ("protocol", "flags", "expected", "seconds"),
    [
        (IPPROTO_TCP, 0, FlowState.SYN, 60),
        (IPPROTO_TCP, abi.FLOW_REPLIED, FlowState.SYN, 60),
        (IPPROTO_TCP, LIVE, FlowState.ESTABLISHED, 1000),
        (IPPROTO_TCP, LIVE | abi.FLOW_CLIENT_FIN, FlowState.CLOSE_WAIT, 100),
        (IPPROTO_TCP, LIVE | abi.FLOW_ENDPOINT_FIN, FlowState.CLOSE_WAIT, 100),
        (IPPROTO_TCP, abi.FLOW_CLIENT_FIN, FlowState.CLOSE_WAIT, 100),
        (IPPROTO_TCP, LIVE | abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN, FlowState.FIN, 10),
        (IPPROTO_TCP, abi.FLOW_RESET, FlowState.FIN, 10),
        (IPPROTO_TCP, LIVE | abi.FLOW_RESET | abi.FLOW_CLIENT_FIN, FlowState.FIN, 10),
        (IPPROTO_UDP, 0, FlowState.UNREPLIED, 30),
        (IPPROTO_UDP, abi.FLOW_REPLIED, FlowState.REPLIED, 180),
        (IPPROTO_SCTP, 0, FlowState.UNREPLIED, 30),
        (IPPROTO_SCTP, abi.FLOW_REPLIED | abi.FLOW_MASQUERADE, FlowState.REPLIED, 180),
    ],
)
def test_state_and_timeout(protocol: int, flags: int, expected: FlowState, seconds: int) -> None:
    assert state(protocol, flags) is expected
    assert timeout(protocol, flags, TIMEOUTS) == seconds


def is_over(flow: Flow, now: int) -> bool:
    return flow.last_seen < over_before(flow.protocol, flow.flags, TIMEOUTS, now)


def test_a_flow_is_over_after_its_timeout_and_not_right_at_it() -> None:
    flow = a_flow(flags=LIVE, last_seen=5 * NS)
    assert not is_over(flow, 1005 * NS)
    assert is_over(flow, 1005 * NS + 1)


def test_a_flow_seen_later_than_now_is_not_over() -> None:
    """Another CPU's clock may be a little ahead."""
    assert not is_over(a_flow(last_seen=500 * NS), 400 * NS)


def test_a_flow_that_is_not_masqueraded_has_two_entries() -> None:
    flow = a_flow()
    client, frontend, endpoint = flow.client, flow.frontend, flow.endpoint
    http, port = htons(80), htons(1001)
    assert keys(flow) == {
        abi.FROM_CLIENT: abi.FLOW_KEY.pack(client, frontend, port, http, IPPROTO_TCP, abi.AT_INGRESS, 0),
        abi.BETWEEN: abi.FLOW_KEY.pack(endpoint, client, htons(8080), port, IPPROTO_TCP, abi.AT_EGRESS, 0),
    }


def test_a_masqueraded_flow_has_a_third_one_by_the_address_that_the_endpoint_sees() -> None:
    flow = a_flow(masquerade="10.0.0.1")
    to = parse_address("10.0.0.1"), htons(8080), htons(40001)
    assert keys(flow)[abi.FROM_ENDPOINT] == abi.FLOW_KEY.pack(
        flow.endpoint, *to, IPPROTO_TCP, abi.AT_INGRESS, 0
    )
    assert len(keys(flow)) == 3


def test_a_flow_whose_masquerade_is_not_chosen_yet_has_no_third_one() -> None:
    assert list(keys(a_flow(flags=abi.FLOW_MASQUERADE))) == [abi.FROM_CLIENT, abi.BETWEEN]


def test_of_a_client_that_is_the_node_itself_what_it_sends_is_seen_at_egress() -> None:
    found = keys(a_flow(flags=abi.FLOW_NODE))
    assert list(found) == [abi.FROM_CLIENT, abi.BETWEEN]
    assert abi.FLOW_KEY.unpack(found[abi.FROM_CLIENT])[5] == abi.AT_EGRESS


def test_the_nodes_own_flow_that_leaves_by_a_device_has_no_part_between() -> None:
    assert list(keys(a_flow(flags=abi.FLOW_NODE, masquerade="10.0.0.1"))) == [
        abi.FROM_CLIENT,
        abi.FROM_ENDPOINT,
    ]


def test_an_entry_is_unpacked_to_what_was_packed() -> None:
    flow = a_flow(flags=LIVE, last_seen=12345, masquerade="10.0.0.1")
    assert Flow.unpack(flow.pack()) == flow
    assert list(Flow._fields) == [field.name for field in abi.FLOW.fields]


@pytest.mark.parametrize(
    "field", ["client_port", "frontend_port", "endpoint_port", "between_port", "protocol"]
)
def test_an_entry_of_another_flow_is_told_apart(field: str) -> None:
    flow = a_flow()
    other = Flow(**(flow._asdict() | {field: 99}))
    assert not same_flow(flow, other)


def test_entries_of_one_flow_may_differ_in_way_time_flags_ids_and_what_masquerades_it() -> None:
    flow = a_flow()
    other = flow._replace(way=abi.BETWEEN, last_seen=9, flags=abi.FLOW_REPLIED, masquerade_port=7)
    other = other._replace(service_id=0, endpoint_id=0)
    assert same_flow(flow, other)


def test_columns_are_the_fields_of_the_whole() -> None:
    flow = a_flow(flags=LIVE, last_seen=12345, masquerade="10.0.0.1")
    some = columns(endpoint="16s", masquerade_port="H", flags="H", protocol="B", last_seen="Q")
    expected = flow.endpoint, flow.masquerade_port, LIVE | abi.FLOW_MASQUERADE, IPPROTO_TCP, 12345
    assert some.unpack(flow.pack()) == expected
