"""What all parts of a relay share."""

import asyncio
import socket
from collections import Counter
from typing import NamedTuple

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.messages import Start
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


class Workload:
    """Event loop, settings, and counters by `Event`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: Start) -> None:
        self.loop = loop
        self.start = start
        self.counts: Counter[str] = Counter()


class Relayed:
    """A TCP connection or UDP flow of a client.

    `service`: as in `Balanced`. `target`: its endpoint. `used`: when it was last active, in the time of the
    event loop.
    """

    __slots__ = ("client", "frontend", "service", "target", "used")
    protocol = ""

    client: Target
    frontend: Target
    service: str
    target: Target
    used: float

    def is_between(self, client: str, frontend: str) -> bool:
        """Return whether these are its ends for the client, as texts with ports."""
        return (str(self.client), str(self.frontend)) == (client, frontend)

    def shown(self, now: float) -> messages.Connection:
        """Return it for readers."""
        ends = str(self.client), str(self.frontend), str(self.target)
        return messages.Connection(self.service, self.protocol, *ends, round(now - self.used, 1))
