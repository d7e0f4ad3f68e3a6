"""The network card of a VM: a tap device of the node, whose frames a process carries to another kernel's.

The VM is a network namespace with a tap device, so that the node sees no pair.
"""

import fcntl
import os
import select
import socket
import struct

from ebpfproxy.lab import Netns

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x2, 0x1000
_LONGEST = 1 << 16


def connect_taps(node: Netns, device: str, guest: Netns, card: str) -> None:
    """Connect the tap device `device` of the node with the tap device `card` of the guest, until both end."""
    for netns, name, end in zip(
        (node, guest), (device, card), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), strict=True
    ):
        _carry(netns, name, end)


def _carry(netns: Netns, device: str, end: socket.socket) -> None:
    def run(ready: int) -> None:
        tap = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH14x", device.encode(), _IFF_TAP | _IFF_NO_PI))
        os.write(ready, b"!")
        os.close(ready)
        while True:
            readable, _, _ = select.select([tap, end.fileno()], [], [])
            if tap in readable:
                end.send(os.read(tap, _LONGEST))
            if end.fileno() in readable:
                os.write(tap, end.recv(_LONGEST))

    netns.start_until_ready(run)
