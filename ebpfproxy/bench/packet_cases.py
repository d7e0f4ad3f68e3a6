"""The packets of the benchmark packet, and the entries of `flows` by which they are translated. Pure.

Two entries send a packet to and fro, so that each run of a program translates.
"""

from collections.abc import Iterator, Mapping
from socket import IPPROTO_TCP, IPPROTO_UDP, htons
from typing import NamedTuple

from ebpfproxy.bench.frames import Tuple, frame
from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.devices import classifier
from ebpfproxy.dataplanes.ebpf.entries import EGRESS, INGRESS
from ebpfproxy.dataplanes.ebpf.flow_state import Flow
from ebpfproxy.model.address import Address, parse_address

_INGRESS, _EGRESS = classifier(0, INGRESS), classifier(0, EGRESS)
_KINDS = {
    ("flow_ns", "ingress"): "ingress_unmarked",
    ("flow_port_ns", "ingress"): "ingress_unmarked",
    ("reply_masqueraded_ns", "ingress"): "ingress_unmarked",
    ("masquerade_ns", "egress"): "egress_forward_marked",
    ("reply_ns", "egress"): "egress_unmarked",
    ("reply_masqueraded_ns", "egress"): "egress_reply_marked",
}
FLOOR = "floor_of_all"
NEW_FLOW, FLOOR_OF_NEW_FLOW = "new_flow", "floor_of_new_flow"
PROGRAMS = (_INGRESS, _EGRESS, *sorted(set(_KINDS.values())), FLOOR, NEW_FLOW, FLOOR_OF_NEW_FLOW)
"""Those of packet.c and tc.c that are run."""

_ESTABLISHED = abi.FLOW_REPLIED | abi.FLOW_ESTABLISHED
_MASQUERADED = _ESTABLISHED | abi.FLOW_MASQUERADE
_NO_ADDRESS = Address(bytes(16))


class Case(NamedTuple):
    """`path` is where the packet is seen and its family. `flows`: entries that send it to and fro."""

    metric: str
    path: str
    program: str
    frame: bytes
    forwarded: bool = True
    flows: Mapping[bytes, Flow] = {}


def cases() -> Iterator[Case]:
    """- floor_ns: a program that does nothing;
    - no_service_ack_ns, _syn_ns, _udp_ns: of nobody's interest; "own": sent by the node itself;
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
    """Ports differ from case to case, since all entries are there at once."""
    c, f, e, m = _PARTIES[family]
    yield _to_and_fro("flow_ns", f"ingress-v{family}", Tuple(c, 4001, f, 80), Tuple(c, 4001, e, 80))
    yield _to_and_fro("flow_port_ns", f"ingress-v{family}", Tuple(c, 4002, f, 80), Tuple(c, 4002, e, 8080))
    yield _to_and_fro(
        "reply_masqueraded_ns", f"ingress-v{family}", Tuple(e, 8080, m, 4003), Tuple(e, 8080, c, 4003)
    )
    yield _to_and_fro("masquerade_ns", f"egress-v{family}", Tuple(c, 4004, e, 8080), Tuple(m, 4004, e, 8080))
    yield _to_and_fro("reply_ns", f"egress-v{family}", Tuple(e, 8080, c, 4005), Tuple(f, 80, c, 4005))
    yield _to_and_fro(
        "reply_masqueraded_ns", f"egress-v{family}", Tuple(e, 8080, c, 4006), Tuple(f, 80, c, 4006)
    )


def _to_and_fro(metric: str, path: str, one: Tuple, other: Tuple) -> Case:
    side = path.partition("-")[0]
    flows = dict(_entry(metric, side, here, there) for here, there in ((one, other), (other, one)))
    return Case(metric, path, _KINDS[metric, side], frame(one, IPPROTO_TCP), flows=flows)


def _entry(metric: str, side: str, seen: Tuple, becomes: Tuple) -> tuple[bytes, Flow]:
    """The entry by which a packet `seen` at a side becomes another one."""
    if side == "ingress":
        key = _key(seen, abi.AT_INGRESS)
        if metric == "reply_masqueraded_ns":
            return key, _flow(abi.FROM_ENDPOINT, _MASQUERADED, Tuple(*becomes[2:], *seen[2:]), seen[:2])
        return key, _flow(abi.FROM_CLIENT, _ESTABLISHED, seen, becomes[2:])
    if metric == "masquerade_ns":  # found by what will come back
        dialed = Tuple(*seen[:2], *seen[2:])
        key = _key(Tuple(*seen[2:], *seen[:2]), abi.AT_EGRESS)
        flow = _flow(abi.BETWEEN, _MASQUERADED, dialed, seen[2:])
        return key, flow._replace(masquerade=becomes.source, masquerade_port=htons(becomes.source_port))
    flags = _MASQUERADED if metric == "reply_masqueraded_ns" else _ESTABLISHED
    dialed = Tuple(*becomes[2:], *becomes[:2])
    return _key(seen, abi.AT_EGRESS), _flow(abi.BETWEEN, flags, dialed, seen[:2])


def _key(ends: Tuple, side: int) -> bytes:
    ports = htons(ends.source_port), htons(ends.destination_port)
    return abi.FLOW_KEY.pack(ends.source, ends.destination, *ports, IPPROTO_TCP, side, 0)


def _flow(way: int, flags: int, dialed: Tuple, endpoint: tuple[Address, int]) -> Flow:
    """Of service 1, which is there. `dialed`: from the client to the frontend."""
    return Flow(
        client=dialed.source,
        frontend=dialed.destination,
        endpoint=endpoint[0],
        masquerade=_NO_ADDRESS,
        client_port=htons(dialed.source_port),
        frontend_port=htons(dialed.destination_port),
        endpoint_port=htons(endpoint[1]),
        between_port=htons(dialed.source_port),
        masquerade_port=0,
        flags=flags,
        service_id=1,
        endpoint_id=1,
        protocol=IPPROTO_TCP,
        way=way,
        pad=0,
        last_seen=0,
    )
