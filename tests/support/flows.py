"""Flows as the programs would write them, and a map that holds them without a kernel."""

from collections.abc import Iterator
from socket import IPPROTO_TCP, htons

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.flow_state import Flow, keys
from ebpfproxy.model.address import Address, parse_address

NS = 1_000_000_000
SERVICE, ENDPOINT = 5, 7
"""Ids that `a_flow` has."""


def a_flow(
    number: int = 1,
    protocol: int = IPPROTO_TCP,
    flags: int = 0,
    last_seen: int = 0,
    masquerade: str = "",
    family: int = 4,
) -> Flow:
    """From client port 1000 + `number`; masqueraded where an address for that is given."""
    prefix = "" if family == 4 else "fd00::"
    return Flow(
        client=parse_address(f"{prefix}192.0.2.9"),
        frontend=parse_address(f"{prefix}10.96.0.1"),
        endpoint=parse_address(f"{prefix}10.244.1.3"),
        masquerade=parse_address(masquerade) if masquerade else Address(bytes(16)),
        client_port=htons(1000 + number),
        frontend_port=htons(80),
        endpoint_port=htons(8080),
        between_port=htons(1000 + number),
        masquerade_port=htons(40000 + number) if masquerade else 0,
        flags=flags | (abi.FLOW_MASQUERADE if masquerade else 0),
        service_id=SERVICE,
        endpoint_id=ENDPOINT,
        protocol=protocol,
        way=abi.FROM_CLIENT,
        pad=0,
        last_seen=last_seen,
    )


def entries(*flows: Flow) -> dict[bytes, bytes]:
    """Every entry that these flows have in the map `flows`."""
    return {key: flow._replace(way=way).pack() for flow in flows for way, key in keys(flow).items()}


def endpoints(flags: int = abi.ENDPOINT_LISTED, service: int = SERVICE, port: int = 8080) -> bytearray:
    """The memory of the map `endpoints`, with that of `a_flow`."""
    memory = bytearray(64 * abi.ENDPOINT.size)
    packed = parse_address("10.244.1.3"), htons(port), flags, service
    abi.ENDPOINT.pack_into(memory, ENDPOINT * abi.ENDPOINT.size, *packed)
    return memory


class FlowMap:
    """As bpf.Map, as far as a walk needs it."""

    def __init__(self, contents: dict[bytes, bytes]) -> None:
        self.contents = dict(contents)
        self.calls: list[int] = []  # how many entries each batch had
        self.lookups = 0

    def batches(self, room: int) -> Iterator[tuple[bytes, bytes]]:
        known = list(self.contents.items())
        for start in range(0, len(known), room):
            part = known[start : start + room]
            self.calls.append(len(part))
            yield b"".join(key for key, _ in part), b"".join(value for _, value in part)

    def lookup(self, key: bytes) -> bytes | None:
        self.lookups += 1
        return self.contents.get(key)

    def delete(self, key: bytes) -> bool:
        return self.contents.pop(key, None) is not None
