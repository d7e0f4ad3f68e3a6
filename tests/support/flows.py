"""Flows as written by the BPF programs, and maps in memory that hold them."""

import sys
from collections.abc import Iterator
from socket import IPPROTO_TCP, htons
from typing import cast

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.state import UNIT, Flow, unit_now
from ebpfproxy.backends.ebpf.flows.sweep import FlowMaps
from ebpfproxy.errors import AlreadyExists
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, parse_address

NS = 1_000_000_000
SERVICE, ENDPOINT = 5, 7
"""Ids of the service and endpoint of `a_flow`."""


def a_flow(
    number: int = 1,
    protocol: int = IPPROTO_TCP,
    flags: int = 0,
    last_seen: int = 0,
    masquerade: str = "",
    family: int = 4,
    half_open: bool = False,
) -> Flow:
    """A flow from client port 1000 + `number`, masqueraded if an address is given.

    `last_seen`: time of the last packet of both sides, in ns of CLOCK_MONOTONIC.
    """
    prefix = "" if family == 4 else "fd00::"
    return Flow(
        client=parse_address(f"{prefix}192.0.2.9"),
        frontend=parse_address(f"{prefix}10.96.0.1"),
        endpoint=parse_address(f"{prefix}10.244.1.3"),
        masquerade=parse_address(masquerade) if masquerade else Address(bytes(16)),
        client_port=htons(1000 + number),
        frontend_port=htons(80),
        endpoint_port=htons(8080),
        reply_port=htons((40000 if masquerade else 1000) + number),
        flags=flags | (abi.FLOW_MASQUERADE if masquerade else 0),
        service_id=SERVICE,
        endpoint_id=ENDPOINT,
        protocol=protocol,
        client_seen=unit_now(last_seen),
        endpoint_seen=unit_now(last_seen),
        half_open=half_open,
    )


def seen(flow: Flow, client: int, endpoint: int) -> Flow:
    """The flow with these times of the last packet of each side, in ns of CLOCK_MONOTONIC."""
    return flow._replace(client_seen=client // UNIT, endpoint_seen=endpoint // UNIT)


def entries(*flows: Flow) -> dict[bytes, bytes]:
    """The entries of these flows in the map `flows`."""
    return dict(flow.entry() for flow in flows)


def reply_entries(*flows: Flow) -> dict[bytes, bytes]:
    """The entries of these flows in the map `replies`."""
    return dict(flow.reply_entry() for flow in flows)


def endpoints(flags: int = abi.ENDPOINT_LISTED, service: int = SERVICE, port: int = 8080) -> bytearray:
    """The memory of the map `endpoints` with the endpoint of `a_flow`."""
    memory = bytearray(64 * abi.ENDPOINT.size)
    packed = parse_address("10.244.1.3"), htons(port), flags, service
    abi.ENDPOINT.pack_into(memory, ENDPOINT * abi.ENDPOINT.size, *packed)
    return memory


class FlowMap:
    """The subset of bpf.Map that a walk needs."""

    def __init__(self, contents: dict[bytes, bytes] | None = None) -> None:
        self.contents = dict(contents or {})
        self.calls: list[int] = []  # number of entries in each batch
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

    def update(self, key: bytes, value: bytes, flags: int = 0) -> None:
        if flags and key in self.contents:
            raise AlreadyExists("cannot write map flows")
        self.contents[key] = value

    def delete(self, key: bytes) -> bool:
        return self.contents.pop(key, None) is not None


class Tables:
    """The flow maps with these flows."""

    def __init__(self, *flows: Flow) -> None:
        self.flows = FlowMap(entries(*flows))
        self.replies = FlowMap(reply_entries(*flows))
        self.established_flows = FlowMap()
        self.endpoints = endpoints()

    def maps(self) -> FlowMaps:
        made = self.flows, self.replies, self.established_flows
        flows, replies, established = (cast(bpf.Map, each) for each in made)
        return FlowMaps(flows, replies, established, self.endpoints)

    def established(self) -> int | None:
        """The number of established flows that is written for the programs; None if none is written."""
        numbers = self.established_flows.contents.values()
        return sum(int.from_bytes(value, sys.byteorder) for value in numbers) if numbers else None

    def has(self, *flows: Flow) -> bool:
        """Whether the maps have exactly these flows, each with both entries."""
        expected = entries(*flows), reply_entries(*flows)
        return (self.flows.contents, self.replies.contents) == expected


def write(maps: dict[str, Map] | object, *flows: Flow) -> None:
    """Write both entries of the flows to real maps."""
    for name, found in (("flows", entries(*flows)), ("replies", reply_entries(*flows))):
        cast(dict[str, Map], maps)[name].update_all(list(found.items()))
