"""Floods of SYNs or datagrams from clients that never answer. The sender is flood.c, compiled once."""

import subprocess
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.lab import Netns
from ebpfproxy.model.address import Protocol

CLIENTS = {"v4": "198.18.0.0", "v6": "2001:2::"}
"""The first address of the clients, by family: networks for benchmarks (RFC 2544, RFC 5180)."""
NETWORKS = {"v4": "198.18.0.0/15", "v6": "2001:2::/48"}
ADDRESSES = 65_536
"""How many clients there are. Each uses another port when all have sent a packet."""

_SOURCE = Path(__file__).with_name("flood.c")
_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")


class Size(NamedTuple):
    """`packets` altogether, `rate` of them each second; 0: as many as the sender can."""

    packets: int
    rate: int


class Sender:
    """The program, in a folder that exists as long as it is used."""

    def __init__(self, folder: Path) -> None:
        """Compile it. Raises subprocess.CalledProcessError."""
        self._binary = folder / "flood"
        subprocess.run(["cc", *_FLAGS, "-o", self._binary, _SOURCE], check=True)

    def start(
        self, place: Netns, protocol: Protocol, address: str, port: int, size: Size
    ) -> "subprocess.Popen[bytes]":
        """Begin a flood from the place to an address; `finish` awaits its end."""
        source = CLIENTS["v6" if ":" in address else "v4"]
        arguments = (source, ADDRESSES, address, port, size.packets, size.rate)
        return place.popen(
            [self._binary, protocol.name.lower(), *map(str, arguments)], stdout=subprocess.PIPE
        )

    @staticmethod
    def finish(flood: "subprocess.Popen[bytes]", timeout: float = 120.0) -> float:
        """The seconds that the flood took. Raises AssertionError where it failed."""
        out, _ = flood.communicate(timeout=timeout)
        assert flood.returncode == 0, f"the flood ended with status {flood.returncode}"
        return float(out)
