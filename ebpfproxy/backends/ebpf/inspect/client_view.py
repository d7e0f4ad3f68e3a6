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

_U64 = struct.Struct("=Q")


class AffinityRow(NamedTuple):
    """An affinity. `client` is an address, or "netns" and the cookie of a network namespace. Times in
    seconds. `timeout` is 0 if no frontend has this service id."""

    service: str
    client: str
    endpoint: str
    age: float
    timeout: int
    service_id: int
    endpoint_id: int


class SocketRow(NamedTuple):
    """A socket and its endpoint. `kind`: "connected", or "datagrams" for an unconnected UDP socket."""

    service: str
    kind: str
    protocol: str
    cookie: int
    frontend: str
    endpoint: str
    service_id: int
    endpoint_id: int


def affinity(maps: Maps, name: NameOf, endpoint_at: Callable[[int], str]) -> list[AffinityRow]:
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
            rows.append(AffinityRow(name(service), *shown, round(age, 3), timeout, service, endpoint))
    return sorted(rows, key=lambda row: row.age)


def _client(client: bytes, kind: int) -> str:
    if kind == abi.CLIENT_NETNS:
        return f"netns {_U64.unpack_from(client)[0]}"
    return format_address(Address(client))


def sockets(maps: Maps, name: NameOf) -> list[SocketRow]:
    """Connected sockets, then unconnected ones, sorted by service, cookie and frontend address."""
    rows = [*_connected(maps, name), *_unconnected(maps, name)]
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


def _connected(maps: Maps, name: NameOf) -> Iterator[SocketRow]:
    for cookie, address, port, protocol, _, service, frontend, frontend_port, _, id_, _ in _peers(maps):
        if cookie:
            endpoints = (frontend, frontend_port), (address, port)
            yield _socket(name(service), "connected", cookie, protocol, *endpoints, service, id_)


def _unconnected(maps: Maps, name: NameOf) -> Iterator[SocketRow]:
    for key, value in maps["socket_flows"].items():
        cookie, address, port, protocol, direction, _ = abi.SOCKET_FLOW_KEY.unpack(key)
        frontend, frontend_port, _, service, id_ = abi.SOCKET_FLOW.unpack(value)
        if direction == abi.TO_FRONTEND:
            endpoints = (frontend, frontend_port), (address, port)
            yield _socket(name(service), "datagrams", cookie, protocol, *endpoints, service, id_)


def _socket(
    service: str,
    kind: str,
    cookie: int,
    protocol: int,
    frontend: tuple[Address, int],
    endpoint: tuple[Address, int],
    service_id: int,
    endpoint_id: int,
) -> SocketRow:
    """A row. Ports in network order."""
    return SocketRow(
        service=service,
        kind=kind,
        protocol=protocol_name(protocol),
        cookie=cookie,
        frontend=format_endpoint(frontend[0], ntohs(frontend[1])),
        endpoint=format_endpoint(endpoint[0], ntohs(endpoint[1])),
        service_id=service_id,
        endpoint_id=endpoint_id,
    )
