"""Small servers and clients over TCP and UDP of both families, to be run within a place."""

import asyncio
import http.server
import socket
from collections.abc import Callable
from typing import Any

from ebpfproxy.model.address import Protocol

Reply = Callable[[str, int], str]
"""From a client's address and port, as its server sees them, to what it is told."""

_TYPES = {
    Protocol.TCP: socket.SOCK_STREAM,
    Protocol.UDP: socket.SOCK_DGRAM,
    Protocol.SCTP: socket.SOCK_STREAM,
}
_BACKLOG = 4096


def listening(protocol: Protocol, port: int, address: str = "::") -> socket.socket:
    """A bound socket, listening where the protocol has that; "::" takes IPv4 too."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, _TYPES[protocol], protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        if protocol != Protocol.UDP:
            listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def serve(listener: socket.socket, reply: Reply) -> None:
    """Answer every chunk or datagram with `reply`, until the process is ended.

    A UDP reply leaves from the address that the route picks: on a place with several addresses of
    one family, listen on the one that is meant.
    """
    if listener.type == socket.SOCK_DGRAM:
        _serve_datagrams(listener, reply)
    else:
        asyncio.run(_serve_streams(listener, reply))


def _serve_datagrams(listener: socket.socket, reply: Reply) -> None:
    while True:
        _question, peer = listener.recvfrom(1 << 16)
        listener.sendto(_answer(reply, peer), peer)


async def _serve_streams(listener: socket.socket, reply: Reply) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = _answer(reply, writer.get_extra_info("peername"))
        try:
            while await reader.read(1 << 16):
                writer.write(answer)
                await writer.drain()
        except ConnectionError:
            pass  # the client's business
        finally:
            writer.close()

    server = await asyncio.start_server(converse, sock=listener, backlog=_BACKLOG)
    await server.serve_forever()


def _answer(reply: Reply, peer: Any) -> bytes:
    return reply(peer[0].removeprefix("::ffff:"), peer[1]).encode()


def serve_http(listener: socket.socket, body: str) -> None:
    """Answer every GET with `body` and a line feed, until the process is ended."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            payload = f"{body}\n".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that went away is its own business."""

    server = Server(("::", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.serve_forever()


def dial(protocol: Protocol, address: str, port: int, timeout: float = 3.0) -> socket.socket:
    """A connected socket; for UDP one that has a peer. Raises OSError, TimeoutError included."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    client = socket.socket(family, _TYPES[protocol], protocol)
    try:
        client.settimeout(timeout)
        client.connect((address, port))
    except OSError:
        client.close()
        raise
    return client


def ask(protocol: Protocol, address: str, port: int, timeout: float = 3.0) -> str:
    """Dial, say something, and return the answer. Raises OSError; ConnectionResetError for none."""
    with dial(protocol, address, port, timeout) as client:
        client.sendall(b"?")
        answer = client.recv(1 << 16)
    if not answer:
        raise ConnectionResetError(f"{address} port {port} closed the connection without an answer")
    return answer.decode()


def ask_unconnected(address: str, port: int, timeout: float = 3.0) -> tuple[str, tuple[str, int]]:
    """Ask by UDP from a socket without a peer; return the answer, and whom it came from."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(timeout)
        client.sendto(b"?", (address, port))
        answer, peer = client.recvfrom(1 << 16)
    return answer.decode(), (peer[0], peer[1])
