"""The header of the PROXY protocol, version 2: the endpoint gets the addresses of the client's connection.

Source: https://www.haproxy.org/download/2.9/doc/proxy-protocol.txt, section 2.2.
"""

import socket
import struct

_SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_VERSION_AND_COMMAND = 0x21  # version 2, PROXY
_FAMILIES = {socket.AF_INET: 0x11, socket.AF_INET6: 0x21}  # both with STREAM


def header(client: tuple[str, int], frontend: tuple[str, int]) -> bytes:
    """Return the header for a TCP connection of a client to a frontend. Both addresses are of one family."""
    number = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    addresses = b"".join(socket.inet_pton(number, each[0].partition("%")[0]) for each in (client, frontend))
    content = addresses + struct.pack("!HH", client[1], frontend[1])
    return _SIGNATURE + struct.pack("!BBH", _VERSION_AND_COMMAND, _FAMILIES[number], len(content)) + content
