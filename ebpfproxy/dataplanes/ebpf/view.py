"""What the pinned maps hold, for people: read alone, so it works with no agent running.

Nothing here writes. A dump of a busy node is no snapshot: entries may change while it is read.
"""

import contextlib
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from socket import ntohs
from typing import NamedTuple

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.maps import Maps
from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.errors import NotFound
from ebpfproxy.model.address import Address, Protocol, format_address, format_endpoint, is_unspecified

_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_SLOT_STRIDE = 8
_PEER_SIZE = abi.SOCKET_PEER.size

_FLAGS = {
    abi.SERVICE_REJECT: "reject",
    abi.SERVICE_RESTRICTED: "source-ranges",
    abi.SERVICE_NODE_ADMITTED: "node-admitted",
    abi.SERVICE_MASQUERADE_POD: "masquerade-pod",
    abi.SERVICE_MASQUERADE_NODE: "masquerade-node",
    abi.SERVICE_MASQUERADE_OUTSIDE: "masquerade-outside",
}


class ServiceRow(NamedTuple):
    """One frontend. `internal` and `external` are the endpoints for clients on this node and for others,
    sorted; `policy` says which list each is. `affinity` is a timeout in seconds, 0 for none."""

    service: str
    kind: str
    protocol: str
    address: str
    port: int
    internal: list[str]
    external: list[str]
    policy: str
    affinity: int
    flags: list[str]
    id: int


class EndpointRow(NamedTuple):
    """`lists`: cluster and local, as far as new connections may use it there. `draining`: in neither."""

    service: str
    protocol: str
    address: str
    port: int
    lists: list[str]
    on_node: bool
    id: int


class AffinityRow(NamedTuple):
    """`client` is an address, or a network namespace by its cookie. `age` is in seconds."""

    service: str
    client: str
    endpoint: str
    age: float
    timeout: int


class SocketRow(NamedTuple):
    """A socket and where it was sent. `kind`: connected, or datagrams for an unconnected UDP socket."""

    service: str
    kind: str
    protocol: str
    cookie: int
    dialed: str
    endpoint: str


class _Endpoint(NamedTuple):
    address: Address
    port: int
    flags: int
    service: int

    def __str__(self) -> str:
        return format_endpoint(self.address, self.port)


class View:
    """The maps of the layout that is hooked in below `root`.

    Raises NotFound where nothing is, Rejected where we may not look.
    """

    def __init__(self, root: Path) -> None:
        self._maps = _open(Pins(root))
        self._slots = self._maps["slots"].mapped()
        self._endpoints = self._maps["endpoints"].mapped()
        self._peers = self._maps["socket_peers"].mapped()
        self._names: dict[int, str] = {}
        for key, value in self._maps["service_names"].items():
            text = abi.SERVICE_NAME.unpack(value)[0].rstrip(b"\0").decode(errors="replace")
            self._names[_U32.unpack(key)[0]] = text

    def close(self) -> None:
        self._slots.close()
        self._endpoints.close()
        self._peers.close()
        self._maps.close()

    def services(self) -> list[ServiceRow]:
        """By service name, then address and port."""
        rows = [self._service(key, value) for key, value in self._maps["services"].items()]
        return [row for _, row in sorted(rows, key=lambda pair: (pair[1].service, pair[0]))]

    def _service(self, key: bytes, value: bytes) -> tuple[bytes, ServiceRow]:
        address, port, protocol, _ = abi.SERVICE_KEY.unpack(key)
        internal, external, id_, affinity, flags, kind, _ = abi.SERVICE.unpack(value)
        policy = (
            "Local" if flags & abi.SERVICE_INTERNAL_LOCAL else "Cluster",
            "Local" if flags & abi.SERVICE_EXTERNAL_LOCAL else "Cluster",
        )
        row = ServiceRow(
            service=self.name(id_),
            kind=abi.KINDS.get(kind, str(kind)),
            protocol=_protocol(protocol),
            address="*" if is_unspecified(address) else format_address(address),
            port=ntohs(port),
            internal=self._endpoints_in(internal),
            external=self._endpoints_in(external),
            policy=policy[0] if policy[0] == policy[1] else "/".join(policy),
            affinity=affinity,
            flags=[
                *(word for bit, word in _FLAGS.items() if flags & bit),
                *(["beyond-slots"] if self._is_beyond(internal) or self._is_beyond(external) else []),
            ],
            id=id_,
        )
        return key, row

    def _endpoints_in(self, packed: bytes) -> list[str]:
        """Of a range that goes beyond the slots, which is none of ours, what there is of it."""
        first, count = abi.SLOT_RANGE.unpack(packed)
        places = range(first, min(first + count, self._room("slots")))
        ids = [_U32.unpack_from(self._slots, place * _SLOT_STRIDE)[0] for place in places]
        found = [self._endpoint(id_) for id_ in ids]
        return [str(e) if e.flags & abi.ENDPOINT_LISTED else f"{e} (retired)" for e in sorted(found)]

    def _is_beyond(self, packed: bytes) -> bool:
        first, count = abi.SLOT_RANGE.unpack(packed)
        return bool(count) and first + count > self._room("slots")

    def _endpoint(self, id_: int) -> _Endpoint:
        if (id_ + 1) * abi.ENDPOINT.size > len(self._endpoints):
            return _Endpoint(Address(bytes(16)), 0, 0, 0)
        address, port, flags, service = abi.ENDPOINT.unpack_from(self._endpoints, id_ * abi.ENDPOINT.size)
        return _Endpoint(address, ntohs(port), flags, service)

    def endpoints(self) -> list[EndpointRow]:
        """By service name, then address and port."""
        rows = []
        size = abi.ENDPOINT.size
        room = self._maps["endpoints"].shape.max_entries * size
        for id_, (_, _, flags, _) in enumerate(abi.ENDPOINT.iter_unpack(self._endpoints[:room])):
            if flags & abi.ENDPOINT_LISTED:
                rows.append((id_, self._endpoint(id_)))
        protocols = self._protocols()
        rows.sort(key=lambda row: (self.name(row[1].service), row[1].address, row[1].port))
        return [
            EndpointRow(
                service=self.name(endpoint.service),
                protocol=protocols.get(endpoint.service, "?"),
                address=format_address(endpoint.address),
                port=endpoint.port,
                lists=[
                    word
                    for bit, word in ((abi.ENDPOINT_CLUSTER, "cluster"), (abi.ENDPOINT_LOCAL, "local"))
                    if endpoint.flags & bit
                ],
                on_node=bool(endpoint.flags & abi.ENDPOINT_ON_NODE),
                id=id_,
            )
            for id_, endpoint in rows
        ]

    def _protocols(self) -> dict[int, str]:
        return {
            _U32.unpack(key)[0]: _protocol(abi.SERVICE_NAME.unpack(value)[1])
            for key, value in self._maps["service_names"].items()
        }

    def affinity(self) -> list[AffinityRow]:
        """Those that are still in force, the latest used first."""
        timeouts = {}
        for _, value in self._maps["services"].items():
            _, _, id_, timeout, *_ = abi.SERVICE.unpack(value)
            timeouts[id_] = timeout
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)  # bpf_ktime_get_ns()
        rows = []
        for key, value in self._maps["affinity"].items():
            client, service, kind = abi.AFFINITY_KEY.unpack(key)
            last_used, endpoint, _ = abi.AFFINITY.unpack(value)
            age = (now - last_used) / 1e9
            timeout = timeouts.get(service, 0)
            if age < timeout:
                rows.append(
                    AffinityRow(
                        service=self.name(service),
                        client=_client(client, kind),
                        endpoint=str(self._endpoint(endpoint)),
                        age=round(age, 3),
                        timeout=timeout,
                    )
                )
        return sorted(rows, key=lambda row: row.age)

    def sockets(self) -> list[SocketRow]:
        """Connected sockets, then unconnected ones, by service, cookie and what was dialed."""
        rows = [*self._connected(), *self._unconnected()]
        return sorted(rows, key=lambda row: (row.kind, row.service, row.cookie, row.dialed, row.endpoint))

    def _connected(self) -> Iterator[SocketRow]:
        for peer in abi.SOCKET_PEER.iter_unpack(self._peers[: self._room("socket_peers") * _PEER_SIZE]):
            cookie, address, port, protocol, _, service, dialed, dialed_port, *_ = peer
            if cookie:
                yield self._socket(
                    "connected", cookie, protocol, service, (dialed, dialed_port), (address, port)
                )

    def _unconnected(self) -> Iterator[SocketRow]:
        for key, value in self._maps["socket_flows"].items():
            cookie, address, port, protocol, direction, _ = abi.SOCKET_FLOW_KEY.unpack(key)
            dialed, dialed_port, _, service, _ = abi.SOCKET_FLOW.unpack(value)
            if direction == abi.TO_FRONTEND:
                yield self._socket(
                    "datagrams", cookie, protocol, service, (dialed, dialed_port), (address, port)
                )

    def _socket(
        self,
        kind: str,
        cookie: int,
        protocol: int,
        service: int,
        dialed: tuple[Address, int],
        endpoint: tuple[Address, int],
    ) -> SocketRow:
        """Ports in network order."""
        return SocketRow(
            service=self.name(service),
            kind=kind,
            protocol=_protocol(protocol),
            cookie=cookie,
            dialed=format_endpoint(dialed[0], ntohs(dialed[1])),
            endpoint=format_endpoint(endpoint[0], ntohs(endpoint[1])),
        )

    def counters(self) -> dict[str, int]:
        """What the programs did, by abi.h's enum counter, summed over the CPUs."""
        totals: Counter[str] = Counter()
        for key, value in self._maps["counters"].items():
            name = abi.COUNTERS.get(_U32.unpack(key)[0])
            if name:
                totals[name] = sum(row[0] for row in _U64.iter_unpack(value))
        return dict(totals)

    def usage(self) -> dict[str, tuple[int, int]]:
        """By map: entries in use, and room; the arrays' by what is in force."""
        ids: dict[int, int] = defaultdict(int)
        for endpoint in self.endpoints():
            ids[endpoint.id] += 1
        return {
            "services": (sum(1 for _ in self._maps["services"].items()), self._room("services")),
            "endpoints": (len(ids), self._room("endpoints") - 1),
            "affinity": (sum(1 for _ in self._maps["affinity"].items()), self._room("affinity")),
            "socket_peers": (sum(1 for _ in self._connected()), self._room("socket_peers")),
            "socket_flows": (sum(1 for _ in self._maps["socket_flows"].items()), self._room("socket_flows")),
        }

    def _room(self, name: str) -> int:
        return self._maps[name].shape.max_entries

    def name(self, service: int) -> str:
        """ "namespace/name:port", or ``?/ID`` for one that has no name."""
        return self._names.get(service, f"?/{service}")


def _open(pins: Pins) -> Maps:
    """An agent with another layout may remove the maps between the link to them and their opening."""
    with contextlib.suppress(NotFound):
        return Maps(pins.hooked_in() / "maps")
    try:
        return Maps(pins.hooked_in() / "maps")
    except NotFound as failure:
        hint = failure.hint or "somebody removed it: start the agent, which makes it anew"
        raise NotFound(failure.message, hint) from failure


def _protocol(number: int) -> str:
    try:
        return Protocol(number).name
    except ValueError:
        return str(number)


def _client(client: bytes, kind: int) -> str:
    if kind == abi.CLIENT_NETNS:
        return f"netns {_U64.unpack_from(client)[0]}"
    return format_address(Address(client))
