"""Clients in the maps: their affinity, and the endpoints that sockets of this node were redirected to."""

import struct
import time
from collections.abc import Callable, Iterator
from socket import ntohs
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.model.address import Address, format_address, format_endpoint, protocol_name

NameOf = Callable[[int], str]
"""The name of a service, by its id."""

LostOf = Callable[[int, int, bytes, int], str]
"""What an entry lacks, "" for nothing.

Arguments: its service id, its endpoint id or NO_ENDPOINT, and the address and port (in network order) of the
endpoint. Without an address, only ids are compared.
"""

_U64 = struct.Struct("=Q")


class AffinityRow(NamedTuple):
    """An affinity. `client` is an address, or "netns" and the cookie of a network namespace. Times in
    seconds. `timeout` is 0 if no frontend has this service id. `orphaned`: the Service or the endpoint is
    gone."""

    service: str
    client: str
    endpoint: str
    age: float
    timeout: int
    service_id: int
    endpoint_id: int
    orphaned: str = ""


class SocketRow(NamedTuple):
    """A socket and its endpoint.

    `kind`: "connected", or "datagrams" for an unconnected UDP socket. The endpoint of a socket that waits for
    one is its frontend. `orphaned`: the Service or the endpoint is gone.
    """

    service: str
    kind: str
    protocol: str
    cookie: int
    frontend: str
    endpoint: str
    service_id: int
    endpoint_id: int
    orphaned: str = ""


def affinity(maps: Maps, name: NameOf, endpoint_at: Callable[[int], str], lost: LostOf) -> list[AffinityRow]:
    """Affinities that are still in force, and those whose service id no frontend has. The most recently used
    first."""
    timeouts = {}
    for _, value in maps["services"].items():
        _, _, id_, timeout, *_ = abi.SERVICE.unpack(value)
        timeouts[id_] = timeout
    now = time.monotonic_ns()  # bpf_ktime_get_ns()
    rows = []
    for key, value in maps["affinity"].items():
        client, service, kind = abi.AFFINITY_KEY.unpack(key)
        last_used, endpoint, _ = abi.AFFINITY.unpack(value)
        age = (now - last_used) / 1e9
        timeout = timeouts.get(service, 0)
        if age < timeout or service not in timeouts:
            shown = _client(client, kind), endpoint_at(endpoint)
            ids = service, endpoint
            orphaned = lost(service, endpoint, b"", 0)
            rows.append(AffinityRow(name(service), *shown, round(age, 3), timeout, *ids, orphaned))
    return sorted(rows, key=lambda row: row.age)


def _client(client: bytes, kind: int) -> str:
    if kind == abi.CLIENT_NETNS:
        return f"netns {_U64.unpack_from(client)[0]}"
    return format_address(Address(client))


def sockets(maps: Maps, name: NameOf, lost: LostOf) -> list[SocketRow]:
    """Connected sockets, then unconnected ones, sorted by service, cookie and frontend address."""
    rows = [
        _socket(each, name, lost(each.service, each.id, *each.endpoint))
        for each in (*_connected(maps), *_unconnected(maps))
    ]
    return sorted(rows, key=lambda row: (row.kind, row.service, row.cookie, row.frontend, row.endpoint))


def connected(maps: Maps) -> int:
    """The number of connected sockets."""
    return sum(1 for peer in _peers(maps) if peer[0])


def _peers(maps: Maps) -> Iterator[tuple[int, Address, int, int, int, int, Address, int, int, int, int]]:
    memory = maps["socket_peers"].mapped()
    room = maps["socket_peers"].shape.max_entries
    try:
        yield from abi.SOCKET_PEER.iter_unpack(memory[: room * abi.SOCKET_PEER.size])
    finally:
        memory.close()


class _Socket(NamedTuple):
    """Ports are in network order."""

    kind: str
    cookie: int
    protocol: int
    frontend: tuple[Address, int]
    endpoint: tuple[Address, int]
    service: int
    id: int


def _connected(maps: Maps) -> Iterator[_Socket]:
    for cookie, address, port, protocol, _, service, frontend, frontend_port, _, id_, _ in _peers(maps):
        if cookie:
            yield _Socket(
                "connected", cookie, protocol, (frontend, frontend_port), (address, port), service, id_
            )


def _unconnected(maps: Maps) -> Iterator[_Socket]:
    for key, value in maps["socket_flows"].items():
        cookie, address, port, protocol, direction, _ = abi.SOCKET_FLOW_KEY.unpack(key)
        frontend, frontend_port, _, service, id_ = abi.SOCKET_FLOW.unpack(value)
        if direction == abi.TO_FRONTEND:
            yield _Socket(
                "datagrams", cookie, protocol, (frontend, frontend_port), (address, port), service, id_
            )


def _socket(found: _Socket, name: NameOf, orphaned: str) -> SocketRow:
    return SocketRow(
        service=name(found.service),
        kind=found.kind,
        protocol=protocol_name(found.protocol),
        cookie=found.cookie,
        frontend=format_endpoint(found.frontend[0], ntohs(found.frontend[1])),
        endpoint=format_endpoint(found.endpoint[0], ntohs(found.endpoint[1])),
        service_id=found.service,
        endpoint_id=found.id,
        orphaned=orphaned,
    )
