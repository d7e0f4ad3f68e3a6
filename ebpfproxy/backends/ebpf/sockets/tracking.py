"""Adds TCP connections of the socket path to conntrack, before another mode begins to translate.

A socket that this mode has translated is connected to the endpoint itself. While no rule asks for tracking,
conntrack does not see it, and an idle one stays unseen afterwards. Its source port is free for another
connection of the same client to the frontend. Netfilter would translate that to the same addresses and ports,
and the endpoint would reset both. With an entry in conntrack it selects another source port.
"""

import contextlib
from socket import ntohs

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import State
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Protocol

log = Logger(__name__)

NOT_TRACKED = "Failed to have conntrack know connections of sockets"
"""A new connection that the next mode translates may be given the addresses and ports of one of these, which
the endpoint then resets. It takes an idle connection, and a client that selects the same port again."""

_OPEN = State.ESTABLISHED, State.CLOSE_WAIT


def track_sockets(maps: Maps, proc_root: str) -> None:
    """Those of all network namespaces whose peer is an endpoint of `maps`, in the conntrack of the calling
    thread's. Rules there have to ask for tracking already, so that none of the active ones is missed."""
    endpoints = _endpoints(maps)
    if not endpoints:
        return
    connections = []
    try:
        with contextlib.closing(namespaces.opened_network_namespaces(proc_root)) as descriptors:
            for descriptor in descriptors:
                with namespaces.in_namespace(descriptor):
                    found = sockets.read(Protocol.TCP, _OPEN, endpoints)
                connections += [
                    ((each.source, each.source_port), (each.destination, each.destination_port))
                    for each in found
                ]
        for rejected, count in conntrack.track_tcp(connections).items():
            log.warning(NOT_TRACKED, connections=count, reason=rejected.reason)
    except KernelError as failure:
        log.warning(NOT_TRACKED, reason=failure.message, hint=failure.hint)


def _endpoints(maps: Maps) -> set[tuple[Address, int]]:
    """Address and port (host order) of each that is in use, of any protocol."""
    with contextlib.closing(maps["endpoints"].mapped()) as entries:
        room = len(entries) // abi.ENDPOINT.size * abi.ENDPOINT.size  # the memory ends with a page
        found = abi.ENDPOINT.iter_unpack(entries[:room])
        return {(Address(address), ntohs(port)) for address, port, _, service in found if service}
