"""Finds the endpoint of one connection in the maps, without reading all entries."""

import contextlib
import struct
from pathlib import Path
from socket import htons, ntohs

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address
from ebpfproxy.model.connection import Connection, Translation

_U32 = struct.Struct("=I")


def find(maps: Path, connection: Connection) -> Translation | None:
    """Return the endpoint of a connection; None if no program translates it.

    `maps`: the directory where the maps are pinned. Raises NotFound if a map is not.
    """
    if connection.cookie:
        with contextlib.closing(Map.pinned(maps / "socket_peers")) as peers:
            if found := _of_socket(peers, connection):
                return found
    with contextlib.closing(Map.pinned(maps / "flows")) as flows:
        return _of_packets(flows, connection)


def _of_socket(peers: Map, connection: Connection) -> Translation | None:
    for way in range(abi.SOCKET_WAYS):
        at = (connection.cookie + way) % peers.shape.max_entries
        value = peers.lookup(_U32.pack(at)) or bytes(abi.SOCKET_PEER.size)
        cookie, address, port, protocol, _, _, _, _, _, endpoint, _ = abi.SOCKET_PEER.unpack(value)
        if (cookie, protocol) == (connection.cookie, connection.protocol):
            is_waiting = endpoint == abi.NO_ENDPOINT
            return None if is_waiting else Translation((Address(address), ntohs(port)), by_socket=True)
    return None


def _of_packets(flows: Map, connection: Connection) -> Translation | None:
    (client, client_port), (frontend, port) = connection.client, connection.frontend
    ports = htons(client_port), htons(port)
    for side in (abi.AT_INGRESS, abi.AT_EGRESS):
        key = abi.FLOW_KEY.pack(client, frontend, *ports, connection.protocol, side, 0)
        if value := flows.lookup(key):
            endpoint, _, endpoint_port, *_ = abi.FLOW.unpack(value)
            return Translation((Address(endpoint), ntohs(endpoint_port)))
    return None
