"""The keys of map entries that rows of a dump describe, for tools such as bpftool. No I/O."""

import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.services.source_ranges import SERVICE_ID_BITS
from ebpfproxy.model.address import (
    Address,
    Family,
    Protocol,
    parse_address,
    parse_endpoint,
    parse_network,
    unspecified,
)

Row = Mapping[str, Any]

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
_NETNS = "netns "

MAPS = {
    "services": "services",
    "endpoints": "endpoints",
    "ranges": "source_ranges",
    "affinity": "affinity",
    "conntrack": "flows",
    "devices": "devices",
    "networks": "local_networks",
}
"""By section of a dump: the map whose keys its rows have."""


def raw_key(section: str, row: Row) -> bytes | None:
    """Return the key of a row's entry. None if its section has none, or if the row does not show it."""
    if section not in _KEYS or row.get("protocol", "TCP") not in Protocol.__members__:
        return None
    return _KEYS[section](row)


def _service(row: Row) -> bytes | None:
    if row["address"] != "*":
        address = parse_address(row["address"])
    elif row.get("family"):
        address = unspecified(Family(row["family"]))
    else:
        return None
    return bytes(abi.SERVICE_KEY.pack(address, socket.htons(row["port"]), Protocol[row["protocol"]], 0))


def _range(row: Row) -> bytes:
    net = parse_network(row["network"])
    return bytes(abi.SOURCE_RANGE_KEY.pack(SERVICE_ID_BITS + net.length, row["service_id"], net.address))


def _affinity(row: Row) -> bytes:
    client: str = row["client"]
    if client.startswith(_NETNS):
        packed, kind = _U64.pack(int(client.removeprefix(_NETNS))) + bytes(8), abi.CLIENT_NETNS
    else:
        packed, kind = parse_address(client), abi.CLIENT_ADDRESS
    return bytes(abi.AFFINITY_KEY.pack(packed, row["service_id"], kind))


def _flow(row: Row) -> bytes:
    (client, client_port), (frontend, port) = _end(row["client"]), _end(row["frontend"])
    side = abi.AT_EGRESS if "node" in row["flags"] else abi.AT_INGRESS
    return bytes(abi.FLOW_KEY.pack(client, frontend, client_port, port, Protocol[row["protocol"]], side, 0))


def _end(text: str) -> tuple[Address, int]:
    """The address, and the port in network order, of "10.0.0.1:80" or "[fd00::1]:80"."""
    address, port = parse_endpoint(text)
    return address, socket.htons(port)


def _network(row: Row) -> bytes:
    net = parse_network(row["network"])
    return bytes(abi.NETWORK_KEY.pack(net.length, net.address))


_KEYS: Mapping[str, Callable[[Row], bytes | None]] = {
    "services": _service,
    "endpoints": lambda row: _U32.pack(row["id"]),
    "ranges": _range,
    "affinity": _affinity,
    "conntrack": _flow,
    "devices": lambda row: _U32.pack(row["ifindex"]),
    "networks": _network,
}
