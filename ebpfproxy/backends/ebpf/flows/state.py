"""Flows of the packet path: their entries, their state, and when they are over. No I/O.

A flow has an entry in `flows`, whose key is that of its client's packets. It has one in `replies`, whose key
is that of its endpoint's packets. A flow is half-open until both sides have sent.

`flow_key`, `reply_key`, `address_digest` and `Oldest` agree with C functions: flow_key_of(), reply_key_of(),
address_digest() and has_passed() of bpf/flow_key.h and bpf/flow_half_open.h.
"""

import dataclasses
import enum
import struct
from socket import IPPROTO_SCTP, IPPROTO_TCP
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.model.address import Address

UNIT = 1 << 30
"""The unit of `last_seen` in ns of CLOCK_MONOTONIC: 1.07 s."""

NO_PLACE = 0xFFFFFFFF
"""Stored instead of an index in `half_open_flows` if the flow has none."""

SCTP_ESTABLISHED = 210
"""Seconds without a packet after which an association is over. Both ends send a heartbeat every 30 s (RFC
9260, 16). The kernel's connection tracking has the same timeout (nf_conntrack_proto_sctp.c)."""

_NS = 1_000_000_000
_U32 = 0xFFFFFFFF
_CLOSED_BY_BOTH = abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN
_NO_ADDRESS = Address(bytes(16))
_WORDS = struct.Struct("=4I")


@dataclasses.dataclass(frozen=True, slots=True)
class FlowTimeouts:
    """Seconds without a packet after which a flow is over. See abi.h's struct node for when each applies."""

    tcp_established: int = 86400
    tcp_close_wait: int = 3600
    tcp_syn: int = 60
    tcp_fin: int = 30
    udp: int = 30
    udp_stream: int = 180


class FlowState(enum.Enum):
    """The state of a flow. The last two are those of UDP and SCTP."""

    SYN = "SYN"
    ESTABLISHED = "ESTABLISHED"
    CLOSE_WAIT = "CLOSE_WAIT"  # one side has closed
    FIN = "FIN"  # both sides have closed, or one has reset
    UNREPLIED = "UNREPLIED"
    REPLIED = "REPLIED"


class Flow(NamedTuple):
    """A flow as both entries describe it. Ports are in network order, times in `UNIT`.

    `masquerade` is the client's address as the endpoint sees it. It is all zero if that is the client's own,
    or not selected yet. `reply_port` is the client's port as the endpoint sees it. `client_seen` and
    `endpoint_seen` are the times of the last packet of each side. `endpoint_seen` is None without a reply
    entry.
    """

    client: Address
    frontend: Address
    endpoint: Address
    masquerade: Address
    client_port: int
    frontend_port: int
    endpoint_port: int
    reply_port: int
    flags: int
    service_id: int
    endpoint_id: int
    protocol: int
    client_seen: int
    endpoint_seen: int | None
    half_open: bool = False

    @classmethod
    def unpack(cls, key: bytes, value: bytes, reply: bytes | None = None) -> "Flow":
        """The flow with this key and value in `flows`. `reply`: the value in `replies`, None if it is
        missing."""
        client, frontend, client_port, frontend_port, protocol, _, _ = abi.FLOW_KEY.unpack(key)
        endpoint, masquerade, *ports, service, id_, flags, half, _, seen, _, _, _ = abi.FLOW.unpack(value)
        reply_flags, _, reply_seen = REPLY_GLANCE.unpack(reply) if reply else (0, 0, None)
        addresses = client, frontend, endpoint, masquerade
        rest = flags | reply_flags, service, id_, protocol, seen, reply_seen, bool(half)
        return cls._make((*map(Address, addresses), client_port, frontend_port, *ports, *rest))

    def entry(self) -> tuple[bytes, bytes]:
        """Key and value in `flows`, as the programs write them. Sequence numbers are 0, and the flow has no
        place in `half_open_flows`.
        """
        side = abi.AT_EGRESS if self.flags & abi.FLOW_NODE else abi.AT_INGRESS
        ports = self.client_port, self.frontend_port
        key = abi.FLOW_KEY.pack(self.client, self.frontend, *ports, self.protocol, side, 0)
        value = abi.FLOW.pack(
            *(self.endpoint, self.masquerade, self.endpoint_port, self.reply_port),
            *(self.service_id, self.endpoint_id, self.flags & ~abi.FLOW_REPLIED, self.half_open, 0),
            *(self.client_seen, 0, 0, NO_PLACE),
        )
        return key, value

    def reply_entry(self) -> tuple[bytes, bytes]:
        """Key and value in `replies`, as the programs write them."""
        key, value = self.entry()
        masquerade = self.masquerade
        reply = abi.REPLY.pack(
            *(self.client, self.frontend, self.client_port, self.frontend_port, self.service_id),
            address_digest(masquerade) if masquerade != _NO_ADDRESS else 0,
            *(self.flags, self.half_open, 0),
            *(self.client_seen if self.endpoint_seen is None else self.endpoint_seen, 0, 0, 0),
        )
        return reply_key(key, value), reply


def columns(layout: abi.Layout, **formats: str) -> struct.Struct:
    """Unpacks only these fields of a packed struct, which is faster in walks over many entries.

    The fields are in the struct's order, with formats of the struct module. A format longer than its field
    includes the fields after it.
    """
    text, at = "=", 0
    for name, format_ in formats.items():
        offset = layout.offset(name)
        text += f"{offset - at}x{format_}"
        at = offset + struct.calcsize("=" + format_)
    return struct.Struct(f"{text}{layout.size - at}x")


REPLY_GLANCE = columns(abi.REPLY, flags="H", half_open="B", last_seen="I")
"""Of a value in `replies`: its flags, whether it is half-open, and when the endpoint sent last."""

_KEY_FROM_FLOW = columns(abi.FLOW, endpoint="16s", endpoint_port="H", reply_port="H", flags="H")
_KEY_FROM_REPLY = columns(
    abi.REPLY, client="16s", frontend="16s", client_port="H", frontend_port="H", flags="H"
)
_PROTOCOL_AT = abi.FLOW_KEY.offset("protocol")


def protocols(keys: bytes) -> bytes:
    """The protocols of concatenated packed keys, one byte each."""
    return keys[_PROTOCOL_AT :: abi.FLOW_KEY.size]


def reply_key(key: bytes, value: bytes) -> bytes:
    """The key in `replies` of the flow with this entry in `flows`."""
    endpoint, endpoint_port, port, flags = _KEY_FROM_FLOW.unpack(value)
    client, side = (
        (_NO_ADDRESS, abi.MASQUERADED) if flags & abi.FLOW_MASQUERADE else (key[:16], abi.AT_EGRESS)
    )
    return abi.FLOW_KEY.pack(endpoint, client, endpoint_port, port, key[_PROTOCOL_AT], side, 0)


def flow_key(key: bytes, value: bytes) -> bytes:
    """The key in `flows` of the flow with this entry in `replies`."""
    client, frontend, client_port, frontend_port, flags = _KEY_FROM_REPLY.unpack(value)
    side = abi.AT_EGRESS if flags & abi.FLOW_NODE else abi.AT_INGRESS
    return abi.FLOW_KEY.pack(client, frontend, client_port, frontend_port, key[_PROTOCOL_AT], side, 0)


def address_digest(address: bytes) -> int:
    """A digest of an address in 32 bits, never 0: `masquerade_digest` in struct reply."""
    first, *others = _WORDS.unpack(address)
    digest: int = first
    for word in others:
        digest = ((digest ^ (digest >> 15)) * 0x9E3779B1 + word) & _U32
    return digest or 1


def state(protocol: int, flags: int, half_open: bool = False) -> FlowState:
    """The state of a flow. `flags`: the flow_flag bits (abi.h) of both entries, combined."""
    if protocol != IPPROTO_TCP:
        return FlowState.REPLIED if flags & abi.FLOW_REPLIED else FlowState.UNREPLIED
    if flags & abi.FLOW_RESET or flags & _CLOSED_BY_BOTH == _CLOSED_BY_BOTH:
        return FlowState.FIN
    if half_open:
        return FlowState.SYN
    return FlowState.CLOSE_WAIT if flags & _CLOSED_BY_BOTH else FlowState.ESTABLISHED


def timeout(protocol: int, flags: int, timeouts: FlowTimeouts, half_open: bool = False) -> int:
    """Seconds without a packet after which an entry is over."""
    if half_open:
        return timeouts.tcp_syn if protocol == IPPROTO_TCP else timeouts.udp
    if protocol == IPPROTO_SCTP:
        return SCTP_ESTABLISHED
    match state(protocol, flags):
        case FlowState.FIN:
            return timeouts.tcp_fin
        case FlowState.CLOSE_WAIT:
            return timeouts.tcp_close_wait
        case FlowState.ESTABLISHED:
            return timeouts.tcp_established
        case _:
            return timeouts.udp_stream


def unit_now(now: int) -> int:
    """A time in `UNIT`, as the programs write it into `last_seen`. `now`: in ns of CLOCK_MONOTONIC."""
    return now >> 30


class Oldest(dict[tuple[int, int, int], int]):
    """By protocol, flags, and whether the entry is half-open: the smallest `last_seen` that is not over.

    `now`: in ns of CLOCK_MONOTONIC.
    """

    def __init__(self, timeouts: FlowTimeouts, now: int) -> None:
        super().__init__()
        self._timeouts = timeouts
        self._now = unit_now(now)

    def __missing__(self, key: tuple[int, int, int]) -> int:
        protocol, flags, half_open = key
        seconds = timeout(protocol, flags, self._timeouts, bool(half_open))
        self[key] = self._now - seconds * _NS // UNIT
        return self[key]
