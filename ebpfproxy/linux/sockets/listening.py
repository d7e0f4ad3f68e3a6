"""Where programs in the calling thread's network namespace listen for connections or receive datagrams.

The kernel reports no changes of sockets, so the caller reads them again. TCP and SCTP sockets count while
they listen, UDP sockets while they are bound and not connected: also those of clients, which have a random
port.
"""

import socket
from collections.abc import Container, Iterator
from pathlib import Path

from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import DiagSocket, State
from ebpfproxy.model.address import Address, Family, Protocol, is_unspecified, unspecified
from ebpfproxy.model.cluster import Listening

_STATES = {Protocol.TCP: State.LISTEN, Protocol.UDP: State.CLOSE, Protocol.SCTP: State.LISTEN}
_PROTOCOLS = Path("/proc/net/protocols")


def read() -> list[DiagSocket]:
    """The sockets, of all protocols that this kernel can list. Raises Rejected."""
    found: list[DiagSocket] = []
    for protocol in _listed():
        try:
            found += (each for each in sockets.read(protocol, [_STATES[protocol]]) if each.source_port)
        except Unsupported:
            continue  # a kernel without this part of sock_diag; others are still known
    return found


def addresses(found: list[DiagSocket], excluded: Container[int] = ()) -> Listening:
    """The addresses of sockets by protocol and port, without those with the inodes `excluded`."""
    at: dict[tuple[Protocol, int], set[Address]] = {}
    for each in found:
        if each.inode not in excluded:
            at.setdefault((each.protocol, each.source_port), set()).update(_addresses(each))
    return {key: frozenset(value) for key, value in at.items()}


def _addresses(of: DiagSocket) -> Iterator[Address]:
    """An IPv6 socket at :: also receives IPv4, unless it has IPV6_V6ONLY."""
    yield of.source
    if of.family == socket.AF_INET6 and is_unspecified(of.source) and not of.v6_only:
        yield unspecified(Family.IPV4)


def _listed() -> Iterator[Protocol]:
    """SCTP is listed only if it is loaded, because listing its sockets would load it."""
    yield from (Protocol.TCP, Protocol.UDP)
    try:
        loaded = _PROTOCOLS.read_text()
    except OSError:
        return
    if any(line.startswith("SCTP") for line in loaded.splitlines()):
        yield Protocol.SCTP
