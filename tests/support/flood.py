"""Floods of TCP segments or datagrams with spoofed sources. The sender is flood.c, compiled once."""

import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

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


class Sources(NamedTuple):
    """Who seems to send: so many addresses from the first one, "" for that of CLIENTS. All of them send a
    packet from the first port, so many times, then from the next port."""

    first: str = ""
    addresses: int = ADDRESSES
    first_port: int = 1024
    repeats: int = 1


MANY = Sources()


class Sender:
    """The compiled program. Its folder must exist as long as it is used."""

    def __init__(self, folder: Path) -> None:
        """Compile it. Raises subprocess.CalledProcessError."""
        self._binary = folder / "flood"
        subprocess.run(["cc", *_FLAGS, "-o", self._binary, _SOURCE], check=True)

    def start(
        self,
        netns: Netns,
        kind: Protocol | Literal["segments"],
        address: str,
        port: int,
        size: Size,
        sources: Sources = MANY,
    ) -> "subprocess.Popen[bytes]":
        """Start a flood from a netns to an address; `finish` waits for its end. TCP: SYNs; "segments": other
        TCP segments, too."""
        first = sources.first or CLIENTS["v6" if ":" in address else "v4"]
        of = (kind.name.lower() if isinstance(kind, Protocol) else kind, first, *sources[1:])
        arguments = (*of, address, port, size.packets, size.rate)
        return netns.popen([self._binary, *map(str, arguments)], stdout=subprocess.PIPE)

    @staticmethod
    def finish(flood: "subprocess.Popen[bytes]", timeout: float = 120.0) -> float:
        """Wait for the end; the flood's duration in seconds. Raises AssertionError if it failed."""
        out, _ = flood.communicate(timeout=timeout)
        assert flood.returncode == 0, f"the flood ended with status {flood.returncode}"
        return float(out)
