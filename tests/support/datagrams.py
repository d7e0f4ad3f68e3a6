"""Exchanges of datagrams with the servers of `lab/sockets`."""

import errno
import socket

from ebpfproxy.lab.sockets import ANSWERED


def ask_unconnected(address: str, port: int, timeout: float = ANSWERED) -> tuple[str, tuple[str, int]]:
    """Send "?" from an unconnected UDP socket; return the answer and its source."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(timeout)
        client.sendto(b"?", (address, port))
        answer, peer = client.recvfrom(1 << 16)
    return answer.decode(), (peer[0], peer[1])


def exchange_datagram(client: socket.socket, payload: bytes, attempts: int = 5) -> bytes:
    """Send the payload by a connected UDP socket to a `serve_echo` server; return the answer.

    Tries again without an answer, or after EMSGSIZE: the first datagrams on a path with a small MTU are
    lost, and both ends learn the MTU from them. Raises TimeoutError after the last attempt.
    """
    for _ in range(attempts):
        try:
            client.send(payload)
            return client.recv(1 << 16)
        except TimeoutError:
            continue
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
    raise TimeoutError(f"{len(payload)} bytes did not come back")
