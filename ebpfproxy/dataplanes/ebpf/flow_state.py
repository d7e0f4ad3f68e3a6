"""Entries of the map `flows`: what they say, and when a flow is over. Pure.

`timeout` and `over_before` agree with flow_timeout() and flow_is_over() of bpf/flow.h, `keys` with
flow_key_of() and flow_has(): the programs decide, this tells people and the collector the same.
"""

import dataclasses
import enum
import struct
from socket import IPPROTO_TCP
from typing import NamedTuple

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.model.address import Address

_NS = 1_000_000_000
_CLOSED_BY_BOTH = abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN


@dataclasses.dataclass(frozen=True, slots=True)
class FlowTimeouts:
    """Seconds that a flow is kept without a packet; abi.h's struct node says when which."""

    tcp_established: int = 86400
    tcp_close_wait: int = 3600
    tcp_syn: int = 60
    tcp_fin: int = 30
    udp: int = 30
    udp_stream: int = 180


class FlowState(enum.Enum):
    """What a flow has come to. The last two are of UDP and SCTP."""

    SYN = "SYN"
    ESTABLISHED = "ESTABLISHED"
    CLOSE_WAIT = "CLOSE_WAIT"  # one side has closed
    FIN = "FIN"  # both sides have, or one has reset
    UNREPLIED = "UNREPLIED"
    REPLIED = "REPLIED"


class Flow(NamedTuple):
    """struct flow, field by field: ports in network order, `last_seen` in ns of CLOCK_MONOTONIC."""

    client: Address
    frontend: Address
    endpoint: Address
    masquerade: Address
    client_port: int
    frontend_port: int
    endpoint_port: int
    between_port: int
    masquerade_port: int
    flags: int
    service_id: int
    endpoint_id: int
    protocol: int
    way: int
    pad: int
    last_seen: int

    @classmethod
    def unpack(cls, value: bytes) -> "Flow":
        return cls._make(abi.FLOW.unpack(value))

    def pack(self) -> bytes:
        return abi.FLOW.pack(*self)


def columns(**formats: str) -> struct.Struct:
    """Of a packed entry these fields alone, in its own order, by formats of the struct module: for walks over
    many. A longer format than that of the field takes in those behind it.
    """
    text, at = "=", 0
    for name, format_ in formats.items():
        offset = abi.FLOW.offset(name)
        text += f"{offset - at}x{format_}"
        at = offset + struct.calcsize("=" + format_)
    return struct.Struct(f"{text}{abi.FLOW.size - at}x")


def state(protocol: int, flags: int) -> FlowState:
    """`flags` are abi.h's flow_flag."""
    if protocol != IPPROTO_TCP:
        return FlowState.REPLIED if flags & abi.FLOW_REPLIED else FlowState.UNREPLIED
    if flags & abi.FLOW_RESET or flags & _CLOSED_BY_BOTH == _CLOSED_BY_BOTH:
        return FlowState.FIN
    if flags & _CLOSED_BY_BOTH:
        return FlowState.CLOSE_WAIT
    return FlowState.ESTABLISHED if flags & abi.FLOW_ESTABLISHED else FlowState.SYN


def timeout(protocol: int, flags: int, timeouts: FlowTimeouts) -> int:
    """Seconds without a packet after which the flow is over: flow_timeout() of bpf/flow.h."""
    match state(protocol, flags):
        case FlowState.SYN:
            return timeouts.tcp_syn
        case FlowState.ESTABLISHED:
            return timeouts.tcp_established
        case FlowState.CLOSE_WAIT:
            return timeouts.tcp_close_wait
        case FlowState.FIN:
            return timeouts.tcp_fin
        case FlowState.UNREPLIED:
            return timeouts.udp
        case FlowState.REPLIED:
            return timeouts.udp_stream


def over_before(protocol: int, flags: int, timeouts: FlowTimeouts, now: int) -> int:
    """What was last seen before this is over at `now`, both in ns of CLOCK_MONOTONIC: flow_is_over() of
    bpf/flow.h.
    """
    return now - timeout(protocol, flags, timeouts) * _NS


def has_between(flags: int) -> bool:
    """A node's own flow that leaves by a device has no part in which it is translated by half."""
    return not (flags & abi.FLOW_NODE and flags & abi.FLOW_MASQUERADE)


def keys(flow: Flow) -> dict[int, bytes]:
    """The keys of all entries that the flow should have, by abi.h's flow_way; `way` does not matter."""
    found = {abi.FROM_CLIENT: _key_from_client(flow)}
    if has_between(flow.flags):
        to = flow.client, flow.between_port
        found[abi.BETWEEN] = _key_from_endpoint(flow, *to, abi.AT_EGRESS)
    if flow.masquerade_port:
        to = flow.masquerade, flow.masquerade_port
        found[abi.FROM_ENDPOINT] = _key_from_endpoint(flow, *to, abi.AT_INGRESS)
    return found


def _key_from_client(flow: Flow) -> bytes:
    side = abi.AT_EGRESS if flow.flags & abi.FLOW_NODE else abi.AT_INGRESS
    ports = flow.client_port, flow.frontend_port
    return abi.FLOW_KEY.pack(flow.client, flow.frontend, *ports, flow.protocol, side, 0)


def _key_from_endpoint(flow: Flow, to: Address, port: int, side: int) -> bytes:
    return abi.FLOW_KEY.pack(flow.endpoint, to, flow.endpoint_port, port, flow.protocol, side, 0)


def same_flow(one: Flow, other: Flow) -> bool:
    """Whether two entries are of one flow: another one may have taken a key while its entry was away. Ids do
    not count, which entries of one flow learn at different times (flow_bring_over() of bpf/flow.h).
    """
    return same_packed_flow(one.pack(), other.pack())


def same_packed_flow(one: bytes, other: bytes) -> bool:
    """As `same_flow`, of entries as they are in the map."""
    return all(one[part] == other[part] for part in _IDENTITY)


def _between(first: str, behind: str) -> slice:
    return slice(abi.FLOW.offset(first), abi.FLOW.offset(behind))


_IDENTITY = (
    _between("client", "masquerade"),
    _between("client_port", "masquerade_port"),
    _between("protocol", "way"),
)
