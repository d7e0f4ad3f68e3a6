"""The flows of the packet path, for people: as connections, and as the translations that they consist of.

Rows are made one by one as they are asked for: of 200 000 flows only the packed entries are held.
"""

import dataclasses
import functools
import struct
import time
from collections.abc import Callable, Iterator
from socket import ntohs
from typing import NamedTuple

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.flow_state import Flow, FlowTimeouts, columns, has_between, state, timeout
from ebpfproxy.dataplanes.ebpf.maps import Maps
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.model.address import Address, format_address, protocol_name

NameOf = Callable[[int], str]
"""The name of a service, by its id."""

_BATCH = 4096  # entries a call
_NS = 1_000_000_000
_U32 = struct.Struct("=I")
_SIDES = {abi.AT_INGRESS: "ingress", abi.AT_EGRESS: "egress"}
_WORDS = {abi.FLOW_NODE: "node", abi.FLOW_REDIRECT: "redirect", abi.FLOW_DIRECT: "direct"}


class FlowRow(NamedTuple):
    """A flow. `service` is "" where the node dialed the endpoint itself, from a port that was taken there;
    `masquerade` is what the endpoint sees instead of the client, "" where that is the client. `age`:
    seconds since its last packet; `left`: until it is over unless another comes, 0 where it is.

    `flags`: node (the client is this node itself), redirect (it skips this node's stack), half (one of its
    entries is missing; the next packet restores it).
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


class TranslationRow(NamedTuple):
    """An entry: a packet from `source` to `destination` at this side of a device becomes one from
    `new_source` to `new_destination`. What goes on to the endpoint is masqueraded at egress by the
    entry of the way back, the one that has the node's address as destination.
    """

    service: str
    protocol: str
    side: str
    source: str
    destination: str
    new_source: str
    new_destination: str


class _Known(NamedTuple):
    """What the entries of one flow say together. `ways`: 1 << abi.h's flow_way for each of them. `service`:
    its id, 0 where it has none.
    """

    service: int
    flags: int
    ways: int
    last_seen: int
    masquerade: bytes
    masquerade_port: int


_NOTHING = _Known(0, 0, 0, 0, bytes(16), 0)
_PARTS = columns(  # 48s: client, frontend, endpoint; 8s: their ports and the one between
    client="48s",
    masquerade="16s",
    client_port="8s",
    masquerade_port="H",
    flags="H",
    service_id="I",
    protocol="s",
    way="B",
    last_seen="Q",
)
_COMMON = struct.Struct("=16s16s16sHHHHB")  # those of _PARTS that all entries of a flow have in common


def conntrack(maps: Maps, name: NameOf) -> Iterator[FlowRow]:
    """Each flow once, by client and frontend; those that are over and not collected yet included."""
    kinds = _Kinds(read_timeouts(maps["node"]))
    found = _flows(maps["flows"])
    now = time.monotonic_ns()
    for common in sorted(found):
        yield _row(common, found[common], kinds, now, name)


def _flows(flows: Map) -> dict[bytes, _Known]:
    """By what the entries of a flow have in common, packed."""
    found: dict[bytes, _Known] = {}
    for _, values in flows.batches(_BATCH):
        for places, to, ports, to_port, flags, service, protocol, way, seen in _PARTS.iter_unpack(values):
            common = places + ports + protocol
            known = found.get(common, _NOTHING)
            found[common] = _Known(
                known.service or service,
                known.flags | flags,
                known.ways | 1 << way,
                max(known.last_seen, seen),
                *((to, to_port) if to_port else known[4:]),
            )
    return found


class _Kind(NamedTuple):
    """What protocol and flags say of a flow. `ways`: those of the entries that it has, but FROM_ENDPOINT."""

    protocol: str
    state: str
    timeout: int
    words: list[str]
    ways: int


class _Kinds(dict[tuple[int, int], _Kind]):
    """By protocol and flags, of which there are few."""

    def __init__(self, timeouts: FlowTimeouts) -> None:
        super().__init__()
        self._timeouts = timeouts

    def __missing__(self, key: tuple[int, int]) -> _Kind:
        protocol, flags = key
        self[key] = _Kind(
            protocol_name(protocol),
            state(protocol, flags).value,
            timeout(protocol, flags, self._timeouts),
            [word for bit, word in _WORDS.items() if flags & bit],
            1 << abi.FROM_CLIENT | has_between(flags) << abi.BETWEEN,
        )
        return self[key]


def _row(common: bytes, known: _Known, kinds: _Kinds, now: int, name: NameOf) -> FlowRow:
    client, frontend, endpoint, cport, fport, eport, _, number = _COMMON.unpack(common)
    service, flags, ways, last_seen, masquerade, mport = known
    protocol, state_, timeout_, words, wanted = kinds[number, flags]
    half = wanted & ~ways or (mport and not ways & 1 << abi.FROM_ENDPOINT)
    age = max(0, now - last_seen) / _NS
    return FlowRow(
        name(service) if service else "",
        protocol,
        _place(client, cport),
        _place(frontend, fport),
        _place(endpoint, eport),
        _place(masquerade, mport) if mport else "",
        state_,
        round(age, 1),
        round(max(0.0, timeout_ - age), 1),
        [*words, "half"] if half else words,
    )


def nat(maps: Maps, name: NameOf) -> Iterator[TranslationRow]:
    """Each entry, by client and frontend."""
    size = abi.FLOW.size
    found: list[bytes] = []
    for _, values in maps["flows"].batches(_BATCH):
        found += (values[at : at + size] for at in range(0, len(values), size))
    found.sort()
    return (_translation(Flow.unpack(value), name) for value in found)


def _translation(flow: Flow, name: NameOf) -> TranslationRow:
    client, between = (flow.client, flow.client_port), (flow.client, flow.between_port)
    frontend = flow.frontend, flow.frontend_port
    endpoint, masquerade = (flow.endpoint, flow.endpoint_port), (flow.masquerade, flow.masquerade_port)
    at_once = flow.flags & abi.FLOW_NODE and flow.masquerade_port  # there is nothing in between
    side = abi.AT_INGRESS
    match flow.way:
        case abi.BETWEEN:
            side = abi.AT_EGRESS
            places = endpoint, between, frontend, client
        case abi.FROM_ENDPOINT:
            places = endpoint, masquerade, *((frontend, client) if at_once else (endpoint, between))
        case _:
            side = abi.AT_EGRESS if flow.flags & abi.FLOW_NODE else abi.AT_INGRESS
            places = client, frontend, masquerade if at_once else between, endpoint
    shown = (_place(*place) for place in places)
    service = name(flow.service_id) if flow.service_id else ""
    return TranslationRow(service, protocol_name(flow.protocol), _SIDES[side], *shown)


def read_timeouts(node: Map) -> FlowTimeouts:
    """Those that the programs go by; the defaults where the agent has not said any yet."""
    value = node.lookup(_U32.pack(0)) or bytes(abi.NODE.size)
    names = [field.name for field in dataclasses.fields(FlowTimeouts)]
    words = dict(zip((field.name for field in abi.NODE.fields), abi.NODE.unpack(value), strict=True))
    found = {name: words[name] for name in names}
    return FlowTimeouts(**found) if any(found.values()) else FlowTimeouts()


def _place(address: bytes, port: int) -> str:
    """`port` in network order."""
    return f"{_host(address)}:{ntohs(port)}"


@functools.lru_cache(maxsize=65536)
def _host(address: bytes) -> str:
    text = format_address(Address(address))
    return f"[{text}]" if ":" in text else text
