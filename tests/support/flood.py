"""Floods of SYNs or datagrams from clients that never reply. The sender is flood.c, compiled once."""

import subprocess
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.lab import Netns
from ebpfproxy.model.address import Protocol

CLIENTS = {"v4": "198.18.0.0", "v6": "2001:2::"}
"""The first client address by family, from the networks for benchmarks (RFC 2544, RFC 5180)."""
NETWORKS = {"v4": "198.18.0.0/15", "v6": "2001:2::/48"}
ADDRESSES = 65_536
"""The number of clients. Each uses another port after all have sent a packet."""

_SOURCE = Path(__file__).with_name("flood.c")
_FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror")


class Size(NamedTuple):
    """`packets` in total, `rate` packets per second; 0: unlimited rate."""

    packets: int
    rate: int


class Sender:
    """The compiled program. Its folder must exist as long as it is used."""

    def __init__(self, folder: Path) -> None:
        """Compile it. Raises subprocess.CalledProcessError."""
        self._binary = folder / "flood"
        subprocess.run(["cc", *_FLAGS, "-o", self._binary, _SOURCE], check=True)

    def start(
        self, netns: Netns, protocol: Protocol, address: str, port: int, size: Size
    ) -> "subprocess.Popen[bytes]":
        """Start a flood from a netns to an address; `finish` waits for its end."""
        source = CLIENTS["v6" if ":" in address else "v4"]
        arguments = (source, ADDRESSES, address, port, size.packets, size.rate)
        return netns.popen(
            [self._binary, protocol.name.lower(), *map(str, arguments)], stdout=subprocess.PIPE
        )

    @staticmethod
    def finish(flood: "subprocess.Popen[bytes]", timeout: float = 120.0) -> float:
        """Wait for the end; the flood's duration in seconds. Raises AssertionError if it failed."""
        out, _ = flood.communicate(timeout=timeout)
        assert flood.returncode == 0, f"the flood ended with status {flood.returncode}"
        return float(out)
