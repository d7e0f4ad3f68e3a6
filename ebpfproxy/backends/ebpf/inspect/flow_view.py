"""The flows of the packet path: as connections for `dump conntrack`, as translation steps for `dump nat`."""

import dataclasses
import functools
import struct
import time
from collections.abc import Iterator
from socket import ntohs
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.pairs import Pair, pairs
from ebpfproxy.backends.ebpf.flows.state import UNIT, Flow, FlowTimeouts, state, timeout
from ebpfproxy.backends.ebpf.inspect.client_view import LostOf, NameOf
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, format_address, is_unspecified, protocol_name

_NS = 1_000_000_000
_U32 = struct.Struct("=I")
_WORDS = {
    abi.FLOW_NODE: "node",
    abi.FLOW_REDIRECT: "redirect",
    abi.FLOW_DIRECT: "direct",
    abi.FLOW_STALE_SOCKET: "stale-socket",
    abi.FLOW_DSR: "dsr",
}

INGRESS, EGRESS = "ingress", "egress"

_AT_ONCE = abi.FLOW_NODE | abi.FLOW_REDIRECT
"""Flows that are translated in one step in each direction, masqueraded or not."""


class FlowRow(NamedTuple):
    """A flow.

    - `service`: "" for a direct flow. This is a connection of the node to the endpoint itself, from an
      address and port that another flow to that endpoint uses.
    - `masquerade`: the client's address and port as the endpoint sees it, "" if the address is the client's
      own.
    - `age`: seconds since the last packet, accurate to 1 s. For a half-open flow: the client's last packet.
    - `left`: seconds until the flow is over if no packet follows, accurate to 1 s. 0 if it is over and not
      removed yet.
    - `flags`: "node" (the client is this node itself), "redirect" (the flow skips this node's stack),
      "direct" (it belongs to no Service), "stale-socket".

    `service_id` and `endpoint_id` are 0 for a direct flow. `orphaned`: the Service or the endpoint is gone.

    With "stale-socket" the client is a UDP socket that is still connected to a removed endpoint. `frontend`
    is that endpoint.
    """

    service: str
    protocol: str
    client: str
    frontend: str
    endpoint: str
    masquerade: str
    state: str
    age: float
    left: float
    flags: list[str]
    service_id: int
    endpoint_id: int
    orphaned: str = ""


def conntrack(maps: Maps, name: NameOf, lost: LostOf) -> Iterator[FlowRow]:
    """Each flow once, sorted by client and frontend. Half-open flows are included."""
    timeouts = read_timeouts(maps["node"])
    found = pairs(maps, timeouts)
    now = time.monotonic_ns()
    for key, flow, _, reply, _ in found:
        if flow:
            yield _row(Flow.unpack(key, flow, reply), timeouts, now, name, lost)


def _row(flow: Flow, timeouts: FlowTimeouts, now: int, name: NameOf, lost: LostOf) -> FlowRow:
    seen = flow.client_seen if flow.half_open else max(flow.client_seen, flow.endpoint_seen or 0)
    age = max(0, now - seen * UNIT) / _NS
    left = timeout(flow.protocol, flow.flags, timeouts, flow.half_open) - age
    return FlowRow(
        name(flow.service_id) if flow.service_id else "",
        protocol_name(flow.protocol),
        place(flow.client, flow.client_port),
        place(flow.frontend, flow.frontend_port),
        place(flow.endpoint, flow.endpoint_port),
        "" if is_unspecified(flow.masquerade) else place(flow.masquerade, flow.reply_port),
        state(flow.protocol, flow.flags, flow.half_open).value,
        round(age, 1),
        round(max(0.0, left), 1),
        [word for bit, word in _WORDS.items() if flow.flags & bit],
        flow.service_id,
        flow.endpoint_id,
        lost(flow.service_id, flow.endpoint_id, flow.endpoint, flow.endpoint_port) if flow.service_id else "",
    )


def read_timeouts(node: Map) -> FlowTimeouts:
    """The timeouts that the programs use, or the defaults if the agent has not written any yet."""
    value = node.lookup(_U32.pack(0)) or bytes(abi.NODE.size)
    names = [field.name for field in dataclasses.fields(FlowTimeouts)]
    words = dict(zip((field.name for field in abi.NODE.fields), abi.NODE.unpack(value), strict=True))
    found = {name: words[name] for name in names}
    return FlowTimeouts(**found) if any(found.values()) else FlowTimeouts()


def place(address: bytes, port: int) -> str:
    """Address and port as text. `port` is in network order."""
    return f"{_host(address)}:{ntohs(port)}"


@functools.lru_cache(maxsize=65536)
def _host(address: bytes) -> str:
    text = format_address(Address(address))
    return f"[{text}]" if ":" in text else text


class TranslationRow(NamedTuple):
    """A translation step at one side of a device. `orphaned`: the Service or the endpoint is gone.

    A packet from `source` to `destination` becomes one from `new_source` to `new_destination`. An unknown
    address is "*". A masqueraded flow that passes the node's stack has two steps in each direction, other
    flows have one.
    """

    service: str
    protocol: str
    side: str
    source: str
    destination: str
    new_source: str
    new_destination: str
    orphaned: str = ""


_Step = tuple[str, str, str, str, str]  # the columns of a row from `side` on


def nat(maps: Maps, name: NameOf, lost: LostOf) -> Iterator[TranslationRow]:
    """Each translation step, sorted by client and frontend."""
    for pair in pairs(maps, read_timeouts(maps["node"])):
        flow = _flow(pair)
        service, orphaned = "", ""
        if flow.service_id:
            service = name(flow.service_id)
            known = flow.endpoint_id if pair.flow else abi.NO_ENDPOINT  # a reply entry has no endpoint id
            orphaned = lost(flow.service_id, known, flow.endpoint, flow.endpoint_port)
        steps = [*(_to_endpoint(flow) if pair.flow else ()), *(_to_client(flow) if pair.reply else ())]
        for step in steps:
            yield TranslationRow._make((service, protocol_name(flow.protocol), *step, orphaned))


def _flow(pair: Pair) -> Flow:
    """A reply entry without a flow contains everything except the masquerade address."""
    if pair.flow:
        return Flow.unpack(pair.key, pair.flow, pair.reply)
    client, frontend, client_port, frontend_port, protocol, _, _ = abi.FLOW_KEY.unpack(pair.key)
    endpoint, _, endpoint_port, reply_port, *_ = abi.FLOW_KEY.unpack(pair.reply_key)
    _, _, _, _, service, _, flags, _, seen, *_ = abi.REPLY.unpack(pair.reply or b"")
    addresses = map(Address, (client, frontend, endpoint, bytes(16)))
    ports = client_port, frontend_port, endpoint_port, reply_port
    return Flow._make((*addresses, *ports, flags, service, 0, protocol, seen, seen, pair.half_open))


def _masquerade(flow: Flow) -> str:
    known = not is_unspecified(flow.masquerade)
    text = place(flow.masquerade, flow.reply_port)
    return text if known else f"*:{text.rpartition(':')[2]}"


def _to_endpoint(flow: Flow) -> Iterator[_Step]:
    client, frontend = place(flow.client, flow.client_port), place(flow.frontend, flow.frontend_port)
    between, endpoint = place(flow.client, flow.reply_port), place(flow.endpoint, flow.endpoint_port)
    masqueraded = flow.flags & abi.FLOW_MASQUERADE
    at_once = masqueraded and flow.flags & _AT_ONCE
    side = EGRESS if flow.flags & abi.FLOW_NODE else INGRESS
    yield side, client, frontend, _masquerade(flow) if at_once else between, endpoint
    if masqueraded and not at_once:
        yield EGRESS, between, endpoint, _masquerade(flow), endpoint


def _to_client(flow: Flow) -> Iterator[_Step]:
    client, frontend = place(flow.client, flow.client_port), place(flow.frontend, flow.frontend_port)
    between, endpoint = place(flow.client, flow.reply_port), place(flow.endpoint, flow.endpoint_port)
    if flow.flags & abi.FLOW_MASQUERADE:
        if flow.flags & _AT_ONCE:
            yield INGRESS, endpoint, _masquerade(flow), frontend, client
            return
        yield INGRESS, endpoint, _masquerade(flow), endpoint, between
    yield EGRESS, endpoint, between, frontend, client
