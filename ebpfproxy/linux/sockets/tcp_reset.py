"""Sends TCP resets for connections of other hosts, from the calling thread's network namespace.

Sources: RFC 9293, 3.1 for the header; RFC 5961, 3.2: a receiver accepts a reset only if its sequence number
is exactly the next one that it expects; raw(7), ip(7) IP_TRANSPARENT.
"""

import socket
import struct
from typing import NamedTuple

from ebpfproxy.errors import KernelError, Rejected, Unsupported
from ebpfproxy.linux.checksum import internet_checksum
from ebpfproxy.model.address import Address, Family, family, format_address, format_endpoint, in_header

_IPV6_HDRINCL = 36
_IP_TRANSPARENT, _IPV6_TRANSPARENT = 19, 75
_RST_ACK = 0x14
_TTL = 64
_TCP = struct.Struct("!HHIIBBHHH")
_V4 = struct.Struct("!BBHHHBBH4s4s")
_V6 = struct.Struct("!IHBB16s16s")


class Reset(NamedTuple):
    """A reset from `source` to `destination`, with ports in host order.

    `sequence`: the next sequence number that the destination expects. `acknowledged`: the next one that it
    sends.
    """

    source: Address
    source_port: int
    destination: Address
    destination_port: int
    sequence: int
    acknowledged: int


def send(reset: Reset) -> None:
    """Send a reset by the route from its source to its destination. The source may be any address.

    Raises Unsupported without CAP_NET_RAW and CAP_NET_ADMIN, else Rejected, for example without a route.
    """
    is_v4 = family(reset.source) is Family.IPV4
    number = socket.AF_INET if is_v4 else socket.AF_INET6
    try:
        with socket.socket(number, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW) as raw:
            if is_v4:
                raw.setsockopt(socket.IPPROTO_IP, _IP_TRANSPARENT, 1)
            else:
                raw.setsockopt(socket.IPPROTO_IPV6, _IPV6_HDRINCL, 1)
                raw.setsockopt(socket.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1)
            raw.bind((format_address(reset.source), 0))  # so that rules for this source select the route
            raw.sendto(packet(reset), (format_address(reset.destination), 0))
    except OSError as error:
        raise _error(reset, error) from error


def packet(reset: Reset) -> bytes:
    """Return the packet with its IP header."""
    source, destination = in_header(reset.source), in_header(reset.destination)
    fields = reset.source_port, reset.destination_port, reset.sequence, reset.acknowledged
    segment = _TCP.pack(*fields, 5 << 4, _RST_ACK, 0, 0, 0)
    pseudo = source + destination + struct.pack("!II", len(segment), socket.IPPROTO_TCP)
    segment = _TCP.pack(*fields, 5 << 4, _RST_ACK, 0, internet_checksum(pseudo + segment), 0)
    if len(source) == len(destination) == 4:
        length = _V4.size + len(segment)
        # The kernel sets the id and the checksum of the IP header (raw(7)).
        return _V4.pack(0x45, 0, length, 0, 0, _TTL, socket.IPPROTO_TCP, 0, source, destination) + segment
    return _V6.pack(6 << 28, len(segment), socket.IPPROTO_TCP, _TTL, source, destination) + segment


def _error(reset: Reset, error: OSError) -> KernelError:
    peer = format_endpoint(reset.destination, reset.destination_port)
    message = f"cannot send a TCP reset to {peer}: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return Unsupported(message, "run with the capabilities CAP_NET_RAW and CAP_NET_ADMIN")
    return Rejected(message)
