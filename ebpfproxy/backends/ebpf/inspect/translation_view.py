"""The flows of the packet path as address translations, for `dump nat`."""

from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.pairs import Pair, pairs
from ebpfproxy.backends.ebpf.flows.state import Flow
from ebpfproxy.backends.ebpf.inspect.flow_view import NameOf, place, read_timeouts
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.model.address import Address, is_unspecified, protocol_name

INGRESS, EGRESS = "ingress", "egress"

_AT_ONCE = abi.FLOW_NODE | abi.FLOW_REDIRECT
"""Flows that are translated in one step each way, masqueraded or not."""


class TranslationRow(NamedTuple):
    """A translation step at one side of a device.

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


_Step = tuple[str, str, str, str, str]  # the columns of a row from `side` on


def nat(maps: Maps, name: NameOf) -> Iterator[TranslationRow]:
    """Each translation step, sorted by client and frontend."""
    for pair in pairs(maps, read_timeouts(maps["node"])):
        flow = _flow(pair)
        service = name(flow.service_id) if flow.service_id else ""
        steps = [*(_to_endpoint(flow) if pair.flow else ()), *(_to_client(flow) if pair.reply else ())]
        for step in steps:
            yield TranslationRow(service, protocol_name(flow.protocol), *step)


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
