"""One connection to a frontend, and where the kernel sends it."""

from typing import NamedTuple

from ebpfproxy.model.address import Address, Protocol


class Connection(NamedTuple):
    """A connection as its client made it. Ports in host order.

    `cookie`: SO_COOKIE of the client's socket, 0 if it is no socket of this machine.
    """

    protocol: Protocol
    client: tuple[Address, int]
    frontend: tuple[Address, int]
    cookie: int = 0


class Translation(NamedTuple):
    """The endpoint of a connection. `by_socket`: a socket hook selected it, and not the packets' path."""

    endpoint: tuple[Address, int]
    by_socket: bool = False
