"""Sockets with given peers, in all network namespaces of the machine."""

import contextlib
from collections.abc import Collection, Generator

from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import Destinations, DiagSocket, State
from ebpfproxy.model.address import Protocol


def by_namespace(
    proc_root: str, protocol: Protocol, states: Collection[State], destinations: Destinations
) -> Generator[tuple[namespaces.Identity, list[DiagSocket]]]:
    """Yield the sockets of each network namespace that are in one of `states` and whose peer is one of
    `destinations`.

    The calling thread is in that namespace until it requests the next one, or closes the generator. Raises
    KernelError if sockets cannot be listed.
    """
    with contextlib.closing(namespaces.opened_network_namespaces(proc_root)) as descriptors:
        for descriptor in descriptors:
            with namespaces.in_namespace(descriptor):
                found = list(sockets.read(protocol, states, destinations))
                yield namespaces.identity_of_descriptor(descriptor), found
