"""The packets of the benchmark packet, and the flows by which they are translated. Pure.

A program runs again and again on one packet, and each run must translate it. Where possible, two flows
translate the packet to and fro. Otherwise the program first puts the address back that the last run replaced;
a floor program does that alone, and what it takes is subtracted.
"""

from collections.abc import Iterator
from socket import IPPROTO_TCP, IPPROTO_UDP, htons
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.devices.filters import classifier
from ebpfproxy.backends.ebpf.entries import EGRESS, INGRESS
from ebpfproxy.backends.ebpf.flows.state import Flow
from ebpfproxy.bench.frames import Tuple, frame
from ebpfproxy.model.address import Address, parse_address

_INGRESS, _EGRESS = classifier(0, INGRESS), classifier(0, EGRESS)
_TO_AND_FRO = {"ingress": "ingress_unmarked", "egress": "egress_unmarked"}
FLOOR = "floor_of_all"
NEW_FLOW, FLOOR_OF_NEW_FLOW = "new_flow", "floor_of_new_flow"
_PUT_BACK = "ingress_node_v4", "ingress_node_v6", "egress_client_v4", "egress_client_v6"
_FLOORS = {name: f"floor_of_{name}" for name in _PUT_BACK}
PROGRAMS = (
    *(_INGRESS, _EGRESS, *_TO_AND_FRO.values(), *_PUT_BACK, *_FLOORS.values()),
    *(FLOOR, NEW_FLOW, FLOOR_OF_NEW_FLOW),
)
"""Those of packet.c and tc.c that are run."""

_NO_ADDRESS = Address(bytes(16))


class Case(NamedTuple):
    """`path` is where the packet is seen and its family. `floor`: the program whose time is subtracted."""

    metric: str
    path: str
    program: str
    frame: bytes
    forwarded: bool = True
    flows: tuple[Flow, ...] = ()
    floor: str = ""


def cases() -> Iterator[Case]:
    """- floor_ns: a program that does nothing;
    - no_service_ack_ns, _syn_ns, _udp_ns: of no Service; "own": sent by the node itself;
    - flow_ns, flow_port_ns: of an established flow, from the client, to another port or not;
    - masquerade_ns: the same, on its way out to another node;
    - reply_ns: back to the client, from an endpoint here; reply_masqueraded_ns: from another node's.
    """
    yield Case("floor_ns", "", FLOOR, _no_service("4", "ack"))
    for family in ("4", "6"):
        for kind in ("ack", "syn", "udp"):
            plain = _no_service(family, kind)
            yield Case(f"no_service_{kind}_ns", f"ingress-v{family}", _INGRESS, plain)
            yield Case(f"no_service_{kind}_ns", f"egress-v{family}", _EGRESS, plain)
            yield Case(f"no_service_{kind}_ns", f"egress-own-v{family}", _EGRESS, plain, forwarded=False)
        yield from _established(family)


def _no_service(family: str, kind: str) -> bytes:
    source, destination = {
        "4": ("198.51.100.7", "203.0.113.9"),
        "6": ("2001:db8:1::7", "2001:db8:2::9"),
    }[family]
    protocol = IPPROTO_UDP if kind == "udp" else IPPROTO_TCP
    ends = Tuple(parse_address(source), 40001, parse_address(destination), 443)
    return frame(ends, protocol, syn=kind == "syn")


class _Parties(NamedTuple):
    """Addresses of one flow: `m` is the node's, which another node's endpoint sees."""

    c: Address
    f: Address
    e: Address
    m: Address


_PARTIES = {
    "4": _Parties(*map(parse_address, ("192.0.2.5", "10.96.0.1", "10.244.2.2", "172.18.0.2"))),
    "6": _Parties(*map(parse_address, ("2001:db8::5", "fd00:96::1", "fd00:244:2::2", "fd00:172:18::2"))),
}


def _established(family: str) -> Iterator[Case]:
    """Client ports differ from case to case, since all flows are there at once."""
    c, f, e, _ = _PARTIES[family]
    yield _from_client("flow_ns", family, Tuple(c, 4001, f, 80), (e, 80))
    yield _from_client("flow_port_ns", family, Tuple(c, 4002, f, 80), (e, 8080))
    yield _reply_in(family, 4003)
    yield _masquerade(family, 4004)
    yield _reply_out("reply_ns", family, 4005, 0)
    yield _reply_out("reply_masqueraded_ns", family, 4006, abi.FLOW_MASQUERADE)


def _from_client(metric: str, family: str, dialed: Tuple, endpoint: tuple[Address, int]) -> Case:
    """To the endpoint, and from there to the frontend as if that were another flow's endpoint."""
    back = Tuple(*dialed[:2], *endpoint)
    flows = _flow(dialed, endpoint), _flow(back, dialed[2:])
    packet = frame(dialed, IPPROTO_TCP)
    return Case(metric, f"ingress-v{family}", _TO_AND_FRO["ingress"], packet, flows=flows)


def _reply_out(metric: str, family: str, port: int, flags: int) -> Case:
    c, f, e, m = _PARTIES[family]
    flows = (
        _flow(Tuple(c, port, f, 80), (e, 8081), flags, m),
        _flow(Tuple(c, port, e, 8081), (f, 80), flags, m),
    )
    packet = frame(Tuple(e, 8081, c, port), IPPROTO_TCP)
    return Case(metric, f"egress-v{family}", _TO_AND_FRO["egress"], packet, flows=flows)


def _reply_in(family: str, port: int) -> Case:
    """To the node's address, which becomes the client's."""
    c, f, e, m = _PARTIES[family]
    flows = (_flow(Tuple(c, port, f, 80), (e, 8081), abi.FLOW_MASQUERADE, m),)
    program = f"ingress_node_v{family}"
    packet = frame(Tuple(e, 8081, m, port), IPPROTO_TCP)
    path = f"ingress-v{family}"
    return Case("reply_masqueraded_ns", path, program, packet, flows=flows, floor=_FLOORS[program])


def _masquerade(family: str, port: int) -> Case:
    """From the client's address, which becomes the node's."""
    c, f, e, m = _PARTIES[family]
    flows = (_flow(Tuple(c, port, f, 80), (e, 8081), abi.FLOW_MASQUERADE, m),)
    program = f"egress_client_v{family}"
    packet = frame(Tuple(c, port, e, 8081), IPPROTO_TCP)
    path = f"egress-v{family}"
    return Case("masquerade_ns", path, program, packet, flows=flows, floor=_FLOORS[program])


def node_addresses() -> tuple[Address, Address]:
    """What masqueraded packets come from, IPv4 and IPv6: the addresses of the device by which they leave."""
    return _PARTIES["4"].m, _PARTIES["6"].m


def _flow(
    dialed: Tuple, endpoint: tuple[Address, int], flags: int = 0, masquerade: Address = _NO_ADDRESS
) -> Flow:
    """Of service 1, which is there. `dialed`: from the client to the frontend."""
    return Flow(
        client=dialed.source,
        frontend=dialed.destination,
        endpoint=endpoint[0],
        masquerade=masquerade if flags & abi.FLOW_MASQUERADE else _NO_ADDRESS,
        client_port=htons(dialed.source_port),
        frontend_port=htons(dialed.destination_port),
        endpoint_port=htons(endpoint[1]),
        reply_port=htons(dialed.source_port),
        flags=flags | abi.FLOW_REPLIED,
        service_id=1,
        endpoint_id=1,
        protocol=IPPROTO_TCP,
        client_seen=0,
        endpoint_seen=0,
    )
