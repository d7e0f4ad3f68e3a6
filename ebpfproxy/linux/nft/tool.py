"""The versions of Linux and of nft(8) on this machine: uname(2), nft(8).

ebpfproxy reads and writes rules through netlink and runs nft only for its version.
"""

import os
import re

from ebpfproxy.errors import KernelError
from ebpfproxy.linux import tools

_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_NFT = re.compile(rf"nftables v({_NUMBERS.pattern})")

Version = tuple[int, int, int]


def linux() -> Version:
    """The version of the running kernel.

    >>> linux() > (3, 0, 0)
    True
    """
    return _version(os.uname().release)


def installed() -> Version | None:
    """The version of the nft in PATH; None if it is missing or reports none.

    In a container this is the image's tool, not the node's.
    """
    path = tools.find("nft")
    try:
        output = tools.run((path, "--version")).output if path else ""
    except KernelError:
        return None
    found = _NFT.search(output)
    return _version(found[1]) if found else None


def _version(text: str) -> Version:
    """
    >>> _version("5.10.0-28-amd64"), _version("6.18-rc1"), _version("unknown")
    ((5, 10, 0), (6, 18, 0), (0, 0, 0))
    """
    found = _NUMBERS.match(text)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)
