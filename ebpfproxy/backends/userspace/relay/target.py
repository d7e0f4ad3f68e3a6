"""An endpoint as the target of sockets."""

import socket
from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, family, format_address


class Target(NamedTuple):
    """Address and port, as the socket calls of Python have them. `number`: AF_INET or AF_INET6."""

    number: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def socket_family(ip_family: Family) -> int:
    """Return AF_INET or AF_INET6."""
    return socket.AF_INET if ip_family is Family.IPV4 else socket.AF_INET6


def target(address: Address, port: int) -> Target:
    """Return an address and port as a target."""
    return Target(int(socket_family(family(address))), format_address(address), port)
