"""Counts the open connections of endpoints, for the algorithm least-connections.

The programs count up for each new connection, and down when a socket is closed. They do not count the ends of
flows, and they lose an update if two sockets take the same entry at the same time. So each walk over the
flows counts everything again.

The connections of a removed endpoint may outlive it, while another endpoint already has its id. So a
connection counts only if its endpoint has the same address and port, and is one of the same Service.
"""

import contextlib
import mmap
import struct
from collections import Counter

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.state import columns
from ebpfproxy.errors import NotFound
from ebpfproxy.linux.bpf.bpf import Map

_U32 = struct.Struct("=I")
_EXIST = 2  # BPF_EXIST
_FLOW = columns(abi.FLOW, endpoint="16s", endpoint_port="H", service_id="I", endpoint_id="I", flags="H")
_PEER = columns(abi.SOCKET_PEER, endpoint_address="16s", endpoint_port="H", service_id="I")
_PEER_SIZE = abi.SOCKET_PEER.size
_ENDPOINT_AT = abi.SOCKET_PEER.offset("endpoint")
_BOTH_FINS = abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN


class Connections:
    """One count: `begin`, then `add_flows` for all flows, then `finish`.

    The memory of the sockets is mapped only during a count, since it takes 4 MB by default, and most nodes
    count nothing.
    """

    def __init__(self, connections: Map, peers: Map, endpoints: mmap.mmap) -> None:
        """`endpoints`: the memory of the map `endpoints`. It closes none of the arguments."""
        self._map = connections
        self._endpoints = endpoints
        self._peers = peers
        self._before: dict[int, int] = {}
        self._targets: dict[int, tuple[bytes, int, int]] = {}  # address, port and service id
        self._found: Counter[int] = Counter()

    @property
    def is_active(self) -> bool:
        """Whether any endpoint is counted."""
        return bool(self._before)

    def begin(self) -> None:
        """Start a count of the endpoints that have an entry now. Raises KernelError."""
        numbers = {_U32.unpack(key)[0]: _U32.unpack(value)[0] for key, value in self._map.items()}
        end = len(self._endpoints) // abi.ENDPOINT.size  # an entry of another program may be beyond it
        self._before = {id_: number for id_, number in numbers.items() if id_ < end}
        self._targets = {id_: self._target(id_) for id_ in self._before}
        self._found = Counter()

    def _target(self, id_: int) -> tuple[bytes, int, int]:
        address, port, _, service = abi.ENDPOINT.unpack_from(self._endpoints, id_ * abi.ENDPOINT.size)
        return address, port, service

    def add_flows(self, values: bytes) -> None:
        """Count the flows of a batch that are open. `values`: of the map `flows`."""
        if not self._before:
            return
        for *target, id_, flags in _FLOW.iter_unpack(values):
            is_open = not flags & abi.FLOW_RESET and flags & _BOTH_FINS != _BOTH_FINS
            if is_open and self._targets.get(id_) == tuple(target):
                self._found[id_] += 1

    def finish(self) -> None:
        """Count the sockets, and write the numbers. Raises KernelError."""
        if self._before:
            self._count_sockets()
        for id_, before in self._before.items():
            with contextlib.suppress(NotFound):  # the endpoint was removed meanwhile
                self._settle(id_, before)

    def _count_sockets(self) -> None:
        places = self._peers.shape.max_entries
        with (
            contextlib.closing(self._peers.mapped()) as peers,
            memoryview(peers).cast("Q") as words,
            memoryview(peers).cast("I") as halves,
        ):
            cookies = words[: places * _PEER_SIZE // 8 : _PEER_SIZE // 8]
            ids = halves[_ENDPOINT_AT // 4 : places * _PEER_SIZE // 4 : _PEER_SIZE // 4]
            for place, (cookie, id_) in enumerate(zip(cookies.tolist(), ids.tolist(), strict=True)):
                if cookie and id_ in self._targets:
                    found = _PEER.unpack_from(peers, place * _PEER_SIZE)
                    self._found[id_] += found == self._targets[id_]
            cookies.release()
            ids.release()

    def _settle(self, id_: int, before: int) -> None:
        """Write a number, unless what the programs have counted since explains the difference."""
        value = self._map.lookup(_U32.pack(id_))
        now = _U32.unpack(value)[0] if value else before
        if abs(self._found[id_] - now) > abs(now - before):
            self._map.update(_U32.pack(id_), _U32.pack(self._found[id_]), _EXIST)
