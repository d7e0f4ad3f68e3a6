"""Finds stale connected UDP sockets in the maps.

The connect() hook records each socket that it redirects in `socket_peers`. Such a socket is stale if
- its endpoint is no longer in force (`endpoints`), or
- it is waiting, connected to a frontend that had no endpoint, and the frontend has one now (`services`).
In both cases another connect() to the frontend repairs it. This module reads the current state instead of a
history of events, so it works across restarts.
"""

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from socket import IPPROTO_UDP, ntohs
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, family, loopback, unspecified

AddressPort = tuple[Address, int]
"""An address and a port (host order)."""

Entry = tuple[int, int, int, Address, int, Address, int]
"""Cookie, ids of service and endpoint, then address and port of the endpoint and of the frontend. Ports are
in network order."""

_U32 = struct.Struct("=I")
_PEER, _ENDPOINT = abi.SOCKET_PEER.size, abi.ENDPOINT.size
_MAPS = "socket_peers", "endpoints", "services", "service_names"


class StalePeer(NamedTuple):
    """A stale socket, by its cookie (SO_COOKIE), and the frontend to which it must be connected.

    `endpoint`: the destination of its packets. If it is `waiting`, that is the frontend. `service`: the id of
    the Service at the time of connect().
    """

    cookie: int
    endpoint: AddressPort
    frontend: AddressPort
    service: int
    waiting: bool

    @property
    def peer(self) -> AddressPort:
        """The peer in the kernel: connect() replaces an unspecified address by loopback."""
        address, port = self.endpoint
        version = family(address)
        return (loopback(version) if address == unspecified(version) else address), port


class SocketPeers:
    """The maps, open until `close`. Programs may change them at any time. For one thread."""

    def __init__(self, maps: Path) -> None:
        """`maps`: the directory where they are pinned. Raises NotFound."""
        with contextlib.ExitStack() as opened:
            pinned = [Map.pinned(maps / name) for name in _MAPS]
            for each in pinned:
                opened.callback(each.close)
            self._peers, endpoints, self._services, self._names = pinned
            self._endpoints = endpoints.mapped()
            opened.callback(self._endpoints.close)
            self._room = endpoints.shape.max_entries
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def stale(self) -> dict[int, StalePeer]:
        """All stale sockets by cookie. On kernels without the hook sock_release, they include closed ones.

        100,000 sockets take about 50 ms, and an empty table of the default size 10 ms.
        """
        known: dict[tuple[int, int, Address, int, Address, int], bool] = {}
        found: dict[int, StalePeer] = {}
        for entry in recorded(self._peers, IPPROTO_UDP):
            key = entry[1:]
            if key not in known:
                known[key] = self._is_stale(*key)
            if known[key]:
                found[entry[0]] = _stale_peer(entry)
        return found

    def of(self, cookie: int) -> StalePeer | None:
        """The socket with this cookie; None if it is not stale at this moment."""
        for way in range(abi.SOCKET_WAYS):
            place = (cookie + way) % self._peers.shape.max_entries
            entry = _entry(self._peers.lookup(_U32.pack(place)) or bytes(_PEER), 0, IPPROTO_UDP)
            if entry and entry[0] == cookie:
                return _stale_peer(entry) if self._is_stale(*entry[1:]) else None
        return None

    def service_name(self, id_: int) -> str:
        """The name as "namespace/name:port"; "" if the Service is gone."""
        value = self._names.lookup(_U32.pack(id_))
        return abi.SERVICE_NAME.unpack(value)[0].rstrip(b"\0").decode(errors="replace") if value else ""

    def _is_stale(
        self, service: int, endpoint: int, address: Address, port: int, frontend: Address, frontend_port: int
    ) -> bool:
        if endpoint == abi.NO_ENDPOINT:
            return self._has_endpoint(frontend, frontend_port)
        if endpoint >= self._room:
            return True
        found = abi.ENDPOINT.unpack_from(self._endpoints, endpoint * _ENDPOINT)
        in_force = found[2] & abi.ENDPOINT_LISTED and found[3] == service
        return not (in_force and found[:2] == (address, port))

    def _has_endpoint(self, address: Address, port: int) -> bool:
        """Whether a frontend has an endpoint. Like service_find() of service.h, but every address is taken
        for an address of NodePorts."""
        for each in address, unspecified(family(Address(address))):
            if value := self._services.lookup(abi.SERVICE_KEY.pack(each, port, IPPROTO_UDP, 0)):
                internal = abi.SERVICE.unpack(value)[0]
                return bool(abi.SLOT_RANGE.unpack(internal)[1])
        return False


def recorded(peers: Map, protocol: int) -> Iterator[Entry]:
    """The entry of each connected socket of a protocol. `peers` is the map `socket_peers`."""
    with peers.mapped() as memory:  # only now: the pages would count toward the RSS meanwhile
        with memoryview(memory).cast("Q") as words:
            cookies = words[: peers.shape.max_entries * _PEER // 8 : _PEER // 8].tolist()
        for at, cookie in enumerate(cookies):
            if cookie and (entry := _entry(memory, at * _PEER, protocol)) and entry[0] == cookie:
                yield entry


def _entry(packed: bytes | mmap.mmap, at: int, protocol: int) -> Entry | None:
    """None for another protocol."""
    fields = abi.SOCKET_PEER.unpack_from(packed, at)
    cookie, address, port, of, _, service, frontend, frontend_port, _, endpoint, _ = fields
    if of != protocol:
        return None
    return cookie, service, endpoint, address, port, frontend, frontend_port


def _stale_peer(entry: Entry) -> StalePeer:
    cookie, service, endpoint, address, port, frontend, frontend_port = entry
    return StalePeer(
        cookie=cookie,
        endpoint=(Address(address), ntohs(port)),
        frontend=(Address(frontend), ntohs(frontend_port)),
        service=service,
        waiting=endpoint == abi.NO_ENDPOINT,
    )
