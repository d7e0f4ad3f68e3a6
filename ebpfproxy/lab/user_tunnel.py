"""IP packets between two nodes in UDP datagrams: a tun device, and a process that relays."""

import fcntl
import os
import select
import socket
import struct

from ebpfproxy.lab.pod import Pod

_PORT = 8285
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000  # include/uapi/linux/if_tun.h


def relay(host: Pod, device: str, peer: str) -> None:
    """Relay what the host's tun device `device` sends to the host with the IPv4 address `peer`, and back.

    Returns once it does; it continues until the lab ends. The peer has to do the same.
    """

    def forever(ready: int) -> None:
        tun = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as carrier:
            carrier.bind((host.v4, _PORT))
            os.write(ready, b"!")
            os.close(ready)
            _carry(tun, carrier, (peer, _PORT))

    host.start_until_ready(forever)


def _carry(tun: int, carrier: socket.socket, peer: tuple[str, int]) -> None:
    while True:
        readable, _, _ = select.select([tun, carrier.fileno()], [], [])
        if tun in readable:
            carrier.sendto(os.read(tun, 1 << 16), peer)
        if carrier.fileno() in readable:
            os.write(tun, carrier.recv(1 << 16))
