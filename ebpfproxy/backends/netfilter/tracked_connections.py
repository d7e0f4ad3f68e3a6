"""The TCP connections that the kernel's NAT translates, and how they are reset if their endpoint was removed.

Conntrack does not know sequence numbers, so the agent cannot send a reset that both sides accept. But a
kernel that has one of both sockets does, and conntrack translates what it sends. So the socket of the client
or of the endpoint is destroyed, if it is in a network namespace of this machine. Otherwise the entry is
deleted: the client's next segment then reaches another endpoint, which replies with a reset. An idle client
of a machine without either socket notices nothing. IPVS has its own table of connections, where the entry
stays.
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from ebpfproxy.backends.connection_resets import NOT_RESET, destroyed
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netlink.conntrack import Flow
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.by_namespace import by_namespace
from ebpfproxy.linux.sockets.sockets import DiagSocket
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Protocol

log = Logger(__name__)

_OPEN = conntrack.TCP_CONNTRACK_ESTABLISHED, conntrack.TCP_CONNTRACK_CLOSE_WAIT
_Ends = tuple[Address, int, Address, int]
"""The local address and port of a socket, and those of its peer."""


class TrackedConnections:
    """See `Resetter`. It uses the network namespace of the thread that calls it."""

    def __init__(self, proc_root: Path) -> None:
        self._proc_root = str(proc_root)

    def connections(self) -> Iterator[Flow]:
        return (
            each for each in conntrack.flows(Protocol.TCP) if each.is_offloaded or each.tcp_state in _OPEN
        )

    def reset(self, connections: Sequence[Flow]) -> Generator[tuple[Flow, bool]]:
        left = dict.fromkeys(connections)
        yield from self._destroy(left)
        for each in left:
            try:
                if conntrack.delete(each):
                    yield each, True
            except KernelError as failure:
                log.debug(NOT_RESET, reason=failure.message)
                yield each, False

    def _destroy(self, left: dict[Flow, None]) -> Generator[tuple[Flow, bool]]:
        """Destroy one socket of each connection that has any, and remove the connection from `left`."""
        by_ends = {ends: each for each in left for ends in (_of_client(each), _of_endpoint(each))}
        peers = {ends[2:] for ends in by_ends}
        with contextlib.closing(by_namespace(self._proc_root, Protocol.TCP, sockets.OPEN, peers)) as spaces:
            for _, found in spaces:
                for sock in found:
                    flow = by_ends.get(_ends(sock))
                    if flow and flow in left and (outcome := destroyed(sock)) is not None:
                        del left[flow]
                        yield flow, outcome
                if not left:
                    return


def _of_client(flow: Flow) -> _Ends:
    return flow.source, flow.source_port, flow.destination, flow.destination_port


def _of_endpoint(flow: Flow) -> _Ends:
    return flow.reply_source, flow.reply_source_port, flow.reply_destination, flow.reply_destination_port


def _ends(sock: DiagSocket) -> _Ends:
    return sock.source, sock.source_port, sock.destination, sock.destination_port
