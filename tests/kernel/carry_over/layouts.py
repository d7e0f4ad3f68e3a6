"""The maps of two layouts, the same Service in both, and short ways to read and write their memory."""

import contextlib
import struct
from pathlib import Path
from socket import htons
from typing import NamedTuple

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.carry_over import CarryOver
from ebpfproxy.dataplanes.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.dataplanes.ebpf.maps import Maps, MapSizes
from ebpfproxy.dataplanes.ebpf.service_table import ServiceTable
from ebpfproxy.model.address import Address, Family, Protocol, parse_address
from tests.kernel.service_table.samples import bring, endpoint, entry, frontend, wipe
from tests.support.clock import Clock

U32, U64 = struct.Struct("=I"), struct.Struct("=Q")
VIP, ONE, TWO, OTHER = map(parse_address, ("10.96.0.1", "10.1.0.1", "10.1.0.2", "10.1.0.3"))
CLIENT = bytes(range(16))
UDP, TCP = Protocol.UDP, Protocol.TCP
FORMER, PRESENT = MapSizes(64, 64, 64, 32, 64, 4096, 16), MapSizes(128, 128, 128, 16, 24, 2048, 16)

FILLER = ServicePortKey("default/filler", TCP, Family.IPV4)
DNS = ServicePortKey("default/dns", UDP, Family.IPV4)


def service(*addresses: str, affinity: int = 60) -> ServicePortEntry:
    front = frontend("10.96.0.1", 53, protocol=UDP)
    return entry([front], [endpoint(address, port=5353) for address in addresses], affinity)


class Layout:
    """The maps of one layout, what is served there, and short ways to read and write its memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.maps = Maps(folder)
        self.table = ServiceTable(self.maps, Clock())

    def close(self) -> None:
        self.table.close()
        self.maps.close()

    def empty(self) -> None:
        wipe(self.maps)
        for key, _ in list(self.maps["socket_flows"].items()):
            self.maps["socket_flows"].delete(key)
        with contextlib.closing(self.maps["socket_peers"].mapped()) as memory:
            memory[:] = bytes(len(memory))
        self.table.close()
        self.table = ServiceTable(self.maps, Clock())  # which gives the same ids again
        self.table.read()

    def serve(self, wanted: dict[ServicePortKey, ServicePortEntry]) -> None:
        bring(self.table, self.table.read(), wanted)

    def ids(self, place: Address = ONE) -> tuple[int, int]:
        """Those of DNS, and of its endpoint at this place."""
        found = self.table.ids_of(DNS)
        assert found
        return found[0], found[1][place, 5353]

    def connect(
        self, cookie: int, ids: tuple[int, int], place: Address = ONE, protocol: Protocol = UDP, way: int = 0
    ) -> None:
        """As peer_write() of socket.h does."""
        at = (cookie + way) % self.maps["socket_peers"].shape.max_entries
        self.maps["socket_peers"].update(U32.pack(at), peer(cookie, ids, place, protocol))

    def forget(self, cookie: int) -> None:
        """As socket_forget() of socket.h does."""
        for key, value in list(self.maps["socket_peers"].items()):
            if U64.unpack_from(value)[0] == cookie:
                self.maps["socket_peers"].update(key, bytes(U64.size) + value[U64.size :])

    def peers(self) -> dict[int, bytes]:
        """By cookie. Each stands where the programs look for it, and once."""
        found: dict[int, bytes] = {}
        size = self.maps["socket_peers"].shape.max_entries
        for key, value in self.maps["socket_peers"].items():
            (cookie,) = U64.unpack_from(value)
            if cookie:
                assert (U32.unpack(key)[0] - cookie) % size < abi.SOCKET_WAYS
                assert cookie not in found
                found[cookie] = value
        return found

    def send(self, cookie: int, ids: tuple[int, int], place: Address = ONE) -> None:
        """As socket_send() of socket.h does."""
        for pair in datagrams(cookie, ids, place):
            self.maps["socket_flows"].update(*pair)

    def datagrams(self) -> dict[bytes, bytes]:
        return dict(self.maps["socket_flows"].items())

    def stick(self, ids: tuple[int, int], last_used: int = 7, client: bytes = CLIENT) -> None:
        self.maps["affinity"].update(
            abi.AFFINITY_KEY.pack(client, ids[0], abi.CLIENT_NETNS), abi.AFFINITY.pack(last_used, ids[1], 0)
        )

    def affinity(self) -> dict[tuple[bytes, int], tuple[int, int]]:
        """From client and service to when it was last used, and the endpoint."""
        found = {}
        for key, value in self.maps["affinity"].items():
            client, of, kind = abi.AFFINITY_KEY.unpack(key)
            assert kind == abi.CLIENT_NETNS
            found[client, of] = abi.AFFINITY.unpack(value)[:2]
        return found


def peer(cookie: int, ids: tuple[int, int], place: Address = ONE, protocol: Protocol = UDP) -> bytes:
    there = place, htons(5353), protocol, 0, ids[0]
    return abi.SOCKET_PEER.pack(cookie, *there, VIP, htons(53), 0, ids[1], 0)


def datagrams(cookie: int, ids: tuple[int, int], place: Address = ONE) -> list[tuple[bytes, bytes]]:
    """Both entries of an unconnected socket."""
    found = []
    for direction, key, value in (
        (abi.TO_ENDPOINT, (VIP, htons(53)), (place, htons(5353))),
        (abi.TO_FRONTEND, (place, htons(5353)), (VIP, htons(53))),
    ):
        packed = abi.SOCKET_FLOW_KEY.pack(cookie, *key, UDP, direction, 0)
        found.append((packed, abi.SOCKET_FLOW.pack(*value, 0, *ids)))
    return found


class Both(NamedTuple):
    former: Layout
    present: Layout

    def carrying(self) -> "contextlib.closing[CarryOver]":
        return contextlib.closing(CarryOver(self.former.folder, self.present.maps, self.present.table.ids_of))

    def carry(self) -> int:
        with self.carrying() as carry_over:
            return carry_over.copy()
