"""Which connected UDP sockets are stale, by the maps alone.

The connect() hook records each socket that it redirects in `socket_peers`. Such a socket is stale where
- its endpoint is not in force any more (`endpoints`), or
- it waits, connected to a frontend that had no endpoint, and the frontend has one now (`services`).
The cure is the same: another connect() to the frontend. The state is read, and never a history of events, so
this works across restarts.
"""

import contextlib
import struct
from pathlib import Path
from socket import IPPROTO_UDP, ntohs
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Address, family, loopback, unspecified

Netns = tuple[Address, int]
"""Address and port (host order)."""

_U32 = struct.Struct("=I")
_PEER, _ENDPOINT = abi.SOCKET_PEER.size, abi.ENDPOINT.size
_MAPS = "socket_peers", "endpoints", "services", "service_names"


class StalePeer(NamedTuple):
    """A socket, by its cookie (SO_COOKIE), and what it has to be connected to.

    `endpoint`: where it sends now, which is the frontend where it is `waiting`. `service`: the id of the
    Service at the time of connect().
    """

    cookie: int
    endpoint: Netns
    frontend: Netns
    service: int
    waiting: bool

    @property
    def peer(self) -> Netns:
        """As the kernel holds it: connect() takes an unspecified address for loopback."""
        address, port = self.endpoint
        version = family(address)
        return (loopback(version) if address == unspecified(version) else address), port


class SocketPeers:
    """The maps, open until `close`. Programs change them meanwhile. For one thread."""

    def __init__(self, maps: Path) -> None:
        """`maps`: the directory where they are pinned. Raises NotFound."""
        with contextlib.ExitStack() as opened:
            held = [Map.pinned(maps / name) for name in _MAPS]
            for each in held:
                opened.callback(each.close)
            peers, endpoints, self._services, self._names = held
            self._peers = peers.mapped()
            opened.callback(self._peers.close)
            self._endpoints = endpoints.mapped()
            opened.callback(self._endpoints.close)
            self._cookies = memoryview(self._peers).cast("Q")[:: _PEER // 8]
            opened.callback(self._cookies.release)
            self._places = peers.shape.max_entries
            self._room = endpoints.shape.max_entries
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def stale(self) -> dict[int, StalePeer]:
        """All stale sockets by cookie, closed ones included on kernels without the hook sock_release.

        100,000 sockets take about 50 ms, and an empty table of the default size 10 ms.
        """
        known: dict[tuple[int, int, Address, int, Address, int], bool] = {}
        found: dict[int, StalePeer] = {}
        for at, cookie in enumerate(self._cookies[: self._places].tolist()):
            if cookie and (entry := self._entry(at)) and entry[0] == cookie:
                key = entry[1:]
                if key not in known:
                    known[key] = self._is_stale(*key)
                if known[key]:
                    found[cookie] = _stale_peer(entry)
        return found

    def of(self, cookie: int) -> StalePeer | None:
        """The socket, if it is stale at this moment."""
        for way in range(abi.SOCKET_WAYS):
            at = (cookie + way) % self._places
            if self._cookies[at] == cookie:
                entry = self._entry(at)
                return _stale_peer(entry) if entry and self._is_stale(*entry[1:]) else None
        return None

    def service_name(self, id_: int) -> str:
        """As "namespace/name:port"; the empty text where the Service is gone."""
        value = self._names.lookup(_U32.pack(id_))
        return abi.SERVICE_NAME.unpack(value)[0].rstrip(b"\0").decode(errors="replace") if value else ""

    def _entry(self, at: int) -> tuple[int, int, int, Address, int, Address, int] | None:
        """Cookie, ids of service and endpoint, the endpoint's place, the frontend's (ports in network
        order); None for TCP."""
        fields = abi.SOCKET_PEER.unpack_from(self._peers, at * _PEER)
        cookie, address, port, protocol, _, service, dialed, dialed_port, _, endpoint, _ = fields
        if protocol != IPPROTO_UDP:
            return None
        return cookie, service, endpoint, address, port, dialed, dialed_port

    def _is_stale(
        self, service: int, endpoint: int, address: Address, port: int, dialed: Address, dialed_port: int
    ) -> bool:
        if endpoint == abi.NO_ENDPOINT:
            return self._has_endpoint(dialed, dialed_port)
        if endpoint >= self._room:
            return True
        found = abi.ENDPOINT.unpack_from(self._endpoints, endpoint * _ENDPOINT)
        in_force = found[2] & abi.ENDPOINT_LISTED and found[3] == service
        return not (in_force and found[:2] == (address, port))

    def _has_endpoint(self, address: Address, port: int) -> bool:
        """As service_find() of service.h, but that every address counts as one of NodePorts."""
        for each in address, unspecified(family(Address(address))):
            if value := self._services.lookup(abi.SERVICE_KEY.pack(each, port, IPPROTO_UDP, 0)):
                internal = abi.SERVICE.unpack(value)[0]
                return bool(abi.SLOT_RANGE.unpack(internal)[1])
        return False


def _stale_peer(entry: tuple[int, int, int, Address, int, Address, int]) -> StalePeer:
    cookie, service, endpoint, address, port, dialed, dialed_port = entry
    return StalePeer(
        cookie=cookie,
        endpoint=(Address(address), ntohs(port)),
        frontend=(Address(dialed), ntohs(dialed_port)),
        service=service,
        waiting=endpoint == abi.NO_ENDPOINT,
    )
