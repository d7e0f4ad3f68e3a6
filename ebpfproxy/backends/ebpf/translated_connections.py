"""The TCP connections of both paths, and how they are reset if their endpoint was removed.

- Socket path: the socket is connected to the endpoint. SOCK_DESTROY ends it in its network namespace, and its
  kernel sends the endpoint a reset.
- Packet path: the flow has the sequence numbers that each side expects next. The agent sends both sides a
  reset and removes the flow. If a side does not accept its reset, since its number is outdated, its next
  segment finds no connection any more.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from socket import IPPROTO_TCP, ntohs
from typing import NamedTuple

from ebpfproxy.backends.connection_resets import NOT_RESET, destroyed
from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.state import Flow, columns, flow_key, protocols, reply_key
from ebpfproxy.backends.ebpf.flows.sweep import BATCH
from ebpfproxy.backends.ebpf.sockets.peers import recorded
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.sockets import sockets, tcp_reset
from ebpfproxy.linux.sockets.by_namespace import by_namespace
from ebpfproxy.linux.sockets.tcp_reset import Reset
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Protocol, is_unspecified

log = Logger(__name__)

_KEY = abi.FLOW_KEY.size
_FRONTEND = columns(abi.FLOW_KEY, destination="16s", destination_port="H")
_FLOW = columns(abi.FLOW, endpoint="16s", endpoint_port="H", service_id="I", flags="H", half_open="B")
_ACKNOWLEDGED = columns(abi.FLOW, acknowledged="I")
_REPLY_ACKNOWLEDGED = columns(abi.REPLY, acknowledged="I")
_BOTH_FINS = abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN


class TranslatedConnection(NamedTuple):
    """A connection of either path. `destination` is the frontend, `reply_source` the endpoint.

    `cookie` identifies the client's socket, 0 on the packet path. `key` is that of the flow there.
    """

    destination: Address
    destination_port: int
    reply_source: Address
    reply_source_port: int
    cookie: int = 0
    key: bytes = b""


class TranslatedConnections:
    """See `Resetter`. `maps` returns the directory where the maps are pinned; it may change."""

    def __init__(self, maps: Callable[[], Path], proc_root: Path) -> None:
        self._maps = maps
        self._proc_root = str(proc_root)

    def connections(self) -> Iterator[TranslatedConnection]:
        with self._opened("socket_peers") as peers, self._opened("flows") as flows:
            yield from _of_sockets(peers)
            yield from _of_flows(flows)

    def reset(
        self, connections: Sequence[TranslatedConnection]
    ) -> Generator[tuple[TranslatedConnection, bool]]:
        yield from self._destroy({each.cookie: each for each in connections if each.cookie})
        with self._opened("flows") as flows, self._opened("replies") as replies:
            for each in connections:
                if not each.cookie and (outcome := _reset_flow(flows, replies, each)) is not None:
                    yield each, outcome

    def _opened(self, name: str) -> contextlib.closing[Map]:
        return contextlib.closing(Map.pinned(self._maps() / name))

    def _destroy(
        self, sought: dict[int, TranslatedConnection]
    ) -> Generator[tuple[TranslatedConnection, bool]]:
        """Destroy sockets. `sought`: by cookie."""
        peers = {(each.reply_source, each.reply_source_port) for each in sought.values()}
        spaces = by_namespace(self._proc_root, Protocol.TCP, sockets.OPEN, peers)
        with contextlib.closing(spaces):
            while sought and (space := next(spaces, None)):
                for sock in space[1]:
                    connection = sought.pop(sock.cookie, None)
                    if connection and (outcome := destroyed(sock)) is not None:
                        yield connection, outcome


def _of_sockets(peers: Map) -> Iterator[TranslatedConnection]:
    for cookie, _, id_, address, port, frontend, frontend_port in recorded(peers, IPPROTO_TCP):
        if id_ != abi.NO_ENDPOINT:
            yield TranslatedConnection(
                *(Address(frontend), ntohs(frontend_port), Address(address), ntohs(port)), cookie
            )


def _of_flows(flows: Map) -> Iterator[TranslatedConnection]:
    for keys, values in flows.batches(BATCH):
        found = zip(protocols(keys), _FRONTEND.iter_unpack(keys), _FLOW.iter_unpack(values), strict=True)
        for at, (protocol, frontend, (endpoint, port, service, flags, half_open)) in enumerate(found):
            is_open = not (half_open or flags & abi.FLOW_RESET or flags & _BOTH_FINS == _BOTH_FINS)
            if protocol == IPPROTO_TCP and service and is_open:
                address, frontend_port = frontend
                yield TranslatedConnection(
                    *(Address(address), ntohs(frontend_port), Address(endpoint), ntohs(port)),
                    key=keys[at * _KEY : (at + 1) * _KEY],
                )


def _reset_flow(flows: Map, replies: Map, connection: TranslatedConnection) -> bool | None:
    """None if the flow has ended meanwhile."""
    key = connection.key
    value = flows.lookup(key)
    if not value or not _goes_to(value, connection):
        return None
    in_replies = reply_key(key, value)
    reply = replies.lookup(in_replies)
    if not reply or flow_key(in_replies, reply) != key:
        return None  # the collector removes it
    try:
        for each in _resets(key, value, reply):
            with contextlib.suppress(Rejected):  # no route leads there: a side may be gone
                tcp_reset.send(each)
        flows.delete(key)
        replies.delete(in_replies)
    except KernelError as failure:
        log.debug(NOT_RESET, reason=failure.message)
        return False
    return True


def _goes_to(value: bytes, connection: TranslatedConnection) -> bool:
    """Whether the entry is still that of the connection, and not of a later one with the same client port."""
    endpoint, port, *_ = _FLOW.unpack(value)
    return (endpoint, ntohs(port)) == (connection.reply_source, connection.reply_source_port)


def _resets(key: bytes, value: bytes, reply: bytes) -> tuple[Reset, Reset]:
    """The resets to the client and to the endpoint."""
    flow = Flow.unpack(key, value, reply)
    (next_of_endpoint,), (next_of_client,) = _ACKNOWLEDGED.unpack(value), _REPLY_ACKNOWLEDGED.unpack(reply)
    frontend, client = (flow.frontend, ntohs(flow.frontend_port)), (flow.client, ntohs(flow.client_port))
    seen_client = flow.client if is_unspecified(flow.masquerade) else flow.masquerade
    endpoint = flow.endpoint, ntohs(flow.endpoint_port)
    return (
        Reset(*frontend, *client, next_of_endpoint, next_of_client),
        Reset(seen_client, ntohs(flow.reply_port), *endpoint, next_of_client, next_of_endpoint),
    )
