"""The test packets of `prog_test_run`, and the flows that translate them. This module has no I/O.

A program runs many times on one packet, and each run must translate it. Where possible, two flows translate
the packet in both directions in turn. Otherwise the program first restores the address that the previous run
replaced. A floor program only restores it; its duration is subtracted.
"""

import struct
from collections.abc import Iterator
from socket import IPPROTO_TCP, IPPROTO_UDP, htons
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.devices.filters import classifier
from ebpfproxy.backends.ebpf.entries import EGRESS, INGRESS
from ebpfproxy.backends.ebpf.flows.state import Flow
from ebpfproxy.linux.checksum import internet_checksum
from ebpfproxy.model.address import Address, Family, family, in_header, parse_address

_INGRESS, _EGRESS = classifier(0, INGRESS), classifier(0, EGRESS)
_BOTH_DIRECTIONS = {"ingress": "ingress_unmarked", "egress": "egress_unmarked"}
FLOOR = "floor_of_all"
NEW_FLOW, FLOOR_OF_NEW_FLOW = "new_flow", "floor_of_new_flow"
_RESTORING = "ingress_node_v4", "ingress_node_v6", "egress_client_v4", "egress_client_v6"
_FLOORS = {name: f"floor_of_{name}" for name in _RESTORING}
PROGRAMS = (
    *(_INGRESS, _EGRESS, *_BOTH_DIRECTIONS.values(), *_RESTORING, *_FLOORS.values()),
    *(FLOOR, NEW_FLOW, FLOOR_OF_NEW_FLOW),
)
"""The programs of packet.c and tc.c that run."""

_NO_ADDRESS = Address(bytes(16))

ETHERNET_ADDRESS = "02:00:00:00:00:02"
"""The destination address of frames. A device must have it, or the kernel treats them as for another host."""

_ETHERNET = bytes.fromhex(ETHERNET_ADDRESS.replace(":", "") + "020000000001")
_PAYLOAD = b"x" * 100
_ACK, _SYN = 0x10, 0x02


class Tuple(NamedTuple):
    """Source and destination of a packet. Ports are in host byte order."""

    source: Address
    source_port: int
    destination: Address
    destination_port: int


def frame(ends: Tuple, protocol: int, *, syn: bool = False) -> bytes:
    """Return a frame with 100 bytes of payload and correct checksums. TCP has the flag ACK, or only SYN."""
    payload = _transport(ends, protocol, _SYN if syn else _ACK)
    if family(ends.source) is Family.IPV4:
        addresses = ends.source[12:] + ends.destination[12:]
        total = 20 + len(payload)
        plain = struct.pack("!BBHHHBBH", 0x45, 0, total, 1, 0, 64, protocol, 0) + addresses
        header = plain[:10] + struct.pack("!H", internet_checksum(plain)) + plain[12:]
        return _ETHERNET + b"\x08\x00" + header + payload
    header = struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64) + ends.source + ends.destination
    return _ETHERNET + b"\x86\xdd" + header + payload


def tuple_of(raw: bytes) -> bytes:
    """Return the addresses and ports of such a frame as raw bytes."""
    start, ports = (26, 34) if raw[12:14] == b"\x08\x00" else (22, 54)
    return raw[start : ports + 4]


def _transport(ends: Tuple, protocol: int, flags: int) -> bytes:
    ports = ends.source_port, ends.destination_port
    if protocol == IPPROTO_TCP:
        at, plain = 16, struct.pack("!HHIIBBHHH", *ports, 1, 1, 5 << 4, flags, 1024, 0, 0) + _PAYLOAD
    else:
        assert protocol == IPPROTO_UDP
        at, plain = 6, struct.pack("!HHHH", *ports, 8 + len(_PAYLOAD), 0) + _PAYLOAD
    pseudo = in_header(ends.source) + in_header(ends.destination) + struct.pack("!II", len(plain), protocol)
    return plain[:at] + struct.pack("!H", internet_checksum(pseudo + plain)) + plain[at + 2 :]


class Case(NamedTuple):
    """A test packet.

    `path` is the direction and the IP version. `floor` is the program whose duration is subtracted, "" for
    none.
    """

    metric: str
    path: str
    program: str
    frame: bytes
    forwarded: bool = True
    flows: tuple[Flow, ...] = ()
    floor: str = ""


def cases() -> Iterator[Case]:
    """Yield all cases. Metrics:

    - floor_ns: a program that does nothing;
    - no_service_ack_ns, _syn_ns, _udp_ns: packets that belong to no Service; path "own": host-originated;
    - flow_ns: an established flow, from the client; flow_port_ns: the same, translated to another port;
    - masquerade_ns: the same, leaving for an endpoint on another node;
    - reply_ns: a reply to the client from a local endpoint; reply_masqueraded_ns: from another node.
    """
    yield Case("floor_ns", "", FLOOR, _no_service("4", "ack"))
    for version in ("4", "6"):
        for kind in ("ack", "syn", "udp"):
            plain = _no_service(version, kind)
            yield Case(f"no_service_{kind}_ns", f"ingress-v{version}", _INGRESS, plain)
            yield Case(f"no_service_{kind}_ns", f"egress-v{version}", _EGRESS, plain)
            yield Case(f"no_service_{kind}_ns", f"egress-own-v{version}", _EGRESS, plain, forwarded=False)
        yield from _established(version)


def _no_service(version: str, kind: str) -> bytes:
    source, destination = {
        "4": ("198.51.100.7", "203.0.113.9"),
        "6": ("2001:db8:1::7", "2001:db8:2::9"),
    }[version]
    protocol = IPPROTO_UDP if kind == "udp" else IPPROTO_TCP
    ends = Tuple(parse_address(source), 40001, parse_address(destination), 443)
    return frame(ends, protocol, syn=kind == "syn")


class _Addresses(NamedTuple):
    """The addresses of a flow. `node` is the source address of masqueraded packets."""

    client: Address
    frontend: Address
    endpoint: Address
    node: Address


_ADDRESSES = {
    "4": _Addresses(*map(parse_address, ("192.0.2.5", "10.96.0.1", "10.244.2.2", "172.18.0.2"))),
    "6": _Addresses(*map(parse_address, ("2001:db8::5", "fd00:96::1", "fd00:244:2::2", "fd00:172:18::2"))),
}


def _established(version: str) -> Iterator[Case]:
    """Yield the cases of established flows. Each has its own client port, because all flows coexist."""
    client, frontend, endpoint, _ = _ADDRESSES[version]
    yield _from_client("flow_ns", version, Tuple(client, 4001, frontend, 80), (endpoint, 80))
    yield _from_client("flow_port_ns", version, Tuple(client, 4002, frontend, 80), (endpoint, 8080))
    yield _reply_in(version, 4003)
    yield _masquerade(version, 4004)
    yield _reply_out("reply_ns", version, 4005, 0)
    yield _reply_out("reply_masqueraded_ns", version, 4006, abi.FLOW_MASQUERADE)


def _from_client(metric: str, version: str, original: Tuple, endpoint: tuple[Address, int]) -> Case:
    """Translate to the endpoint, then back to the frontend, which is the endpoint of a second flow."""
    back = Tuple(*original[:2], *endpoint)
    flows = _flow(original, endpoint), _flow(back, original[2:])
    packet = frame(original, IPPROTO_TCP)
    return Case(metric, f"ingress-v{version}", _BOTH_DIRECTIONS["ingress"], packet, flows=flows)


def _reply_out(metric: str, version: str, port: int, flags: int) -> Case:
    client, frontend, endpoint, node = _ADDRESSES[version]
    flows = (
        _flow(Tuple(client, port, frontend, 80), (endpoint, 8081), flags, node),
        _flow(Tuple(client, port, endpoint, 8081), (frontend, 80), flags, node),
    )
    packet = frame(Tuple(endpoint, 8081, client, port), IPPROTO_TCP)
    return Case(metric, f"egress-v{version}", _BOTH_DIRECTIONS["egress"], packet, flows=flows)


def _reply_in(version: str, port: int) -> Case:
    """Translate the destination from the node's address to the client's."""
    client, frontend, endpoint, node = _ADDRESSES[version]
    flows = (_flow(Tuple(client, port, frontend, 80), (endpoint, 8081), abi.FLOW_MASQUERADE, node),)
    program = f"ingress_node_v{version}"
    packet = frame(Tuple(endpoint, 8081, node, port), IPPROTO_TCP)
    path = f"ingress-v{version}"
    return Case("reply_masqueraded_ns", path, program, packet, flows=flows, floor=_FLOORS[program])


def _masquerade(version: str, port: int) -> Case:
    """Translate the source from the client's address to the node's."""
    client, frontend, endpoint, node = _ADDRESSES[version]
    flows = (_flow(Tuple(client, port, frontend, 80), (endpoint, 8081), abi.FLOW_MASQUERADE, node),)
    program = f"egress_client_v{version}"
    packet = frame(Tuple(client, port, endpoint, 8081), IPPROTO_TCP)
    path = f"egress-v{version}"
    return Case("masquerade_ns", path, program, packet, flows=flows, floor=_FLOORS[program])


def node_addresses() -> tuple[Address, Address]:
    """Return the source addresses of masqueraded packets, IPv4 and IPv6: those of the output device."""
    return _ADDRESSES["4"].node, _ADDRESSES["6"].node


def _flow(
    original: Tuple, endpoint: tuple[Address, int], flags: int = 0, masquerade: Address = _NO_ADDRESS
) -> Flow:
    """Return a flow of service 1, which exists. `original` is the tuple from client to frontend."""
    return Flow(
        client=original.source,
        frontend=original.destination,
        endpoint=endpoint[0],
        masquerade=masquerade if flags & abi.FLOW_MASQUERADE else _NO_ADDRESS,
        client_port=htons(original.source_port),
        frontend_port=htons(original.destination_port),
        endpoint_port=htons(endpoint[1]),
        reply_port=htons(original.source_port),
        flags=flags | abi.FLOW_REPLIED,
        service_id=1,
        endpoint_id=1,
        protocol=IPPROTO_TCP,
        client_seen=0,
        endpoint_seen=0,
    )
