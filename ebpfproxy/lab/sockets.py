"""Small servers and clients for TCP and UDP of both families. They run in the calling process' namespace."""

import asyncio
import http.server
import socket
import threading
from collections.abc import Callable
from typing import Any

from ebpfproxy.model.address import Protocol

Reply = Callable[[str, int], str]
"""Returns the answer for a client's address and port, as its server sees them."""

Create = Callable[[int, int, int], socket.socket]
"""Creates a socket of a family, type and protocol, as socket.socket does."""

_TYPES = {
    Protocol.TCP: socket.SOCK_STREAM,
    Protocol.UDP: socket.SOCK_DGRAM,
    Protocol.SCTP: socket.SOCK_STREAM,
}
_BACKLOG = 4096

ANSWERED = 20.0
"""The timeout in seconds for an answer that is expected, even on a busy machine."""


def listening(protocol: Protocol, port: int, address: str = "::") -> socket.socket:
    """Return a bound socket, which listens unless the protocol is UDP. "::" accepts IPv4, too."""
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
    """Answer every chunk or datagram with `reply`, until the process is killed.

    The route determines the source address of a UDP reply. In a namespace with several addresses of one
    family, listen on a specific address.
    """
    if listener.type == socket.SOCK_DGRAM:
        _serve_datagrams(listener, reply)
    else:
        asyncio.run(_serve_streams(listener, reply))


def _serve_datagrams(listener: socket.socket, reply: Reply) -> None:
    while True:
        _request, peer = listener.recvfrom(1 << 16)
        listener.sendto(_answer(reply, peer), peer)


async def _serve_streams(listener: socket.socket, reply: Reply) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = _answer(reply, writer.get_extra_info("peername"))
        try:
            while await reader.read(1 << 16):
                writer.write(answer)
                await writer.drain()
        except ConnectionError:
            pass  # the client reports it
        finally:
            writer.close()

    server = await asyncio.start_server(converse, sock=listener, backlog=_BACKLOG)
    await server.serve_forever()


def serve_echo(listener: socket.socket, reply: Reply) -> None:
    """Answer "?" with `reply` and echo everything else, until the process is killed.

    The first chunk of a stream decides for the complete stream. For UDP replies, see `serve`.
    """
    if listener.type == socket.SOCK_DGRAM:
        while True:
            request, peer = listener.recvfrom(1 << 16)
            listener.sendto(_answer(reply, peer) if request == b"?" else request, peer)
    asyncio.run(_serve_echo_streams(listener, reply))


async def _serve_echo_streams(listener: socket.socket, reply: Reply) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = chunk = await reader.read(1 << 16)
            answer = _answer(reply, writer.get_extra_info("peername"))
            while chunk:
                writer.write(answer if first == b"?" else chunk)
                await writer.drain()
                chunk = await reader.read(1 << 16)
        except OSError:
            pass  # the client reports it; a missing route is not a ConnectionError
        finally:
            writer.close()

    server = await asyncio.start_server(converse, sock=listener, backlog=_BACKLOG)
    await server.serve_forever()


def _answer(reply: Reply, peer: Any) -> bytes:
    return reply(peer[0].removeprefix("::ffff:"), peer[1]).encode()


def serve_http(listener: socket.socket, body: str) -> None:
    """Answer every GET with `body` and a line feed, until the process is killed."""

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
            """Ignore clients that disconnected."""

    server = Server(("::", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.serve_forever()


def dial(
    protocol: Protocol,
    address: str,
    port: int,
    timeout: float = ANSWERED,
    source: tuple[str, int] = ("", 0),
    create: Create = socket.socket,
) -> socket.socket:
    """Return a connected socket. Raises OSError, including TimeoutError.

    `source` is the local address and port to bind; "" and 0 mean any.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    client = create(family, _TYPES[protocol], protocol)
    try:
        client.settimeout(timeout)
        if source != ("", 0):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.bind(source)
        client.connect((address, port))
    except OSError:
        client.close()
        raise
    return client


def ask(
    protocol: Protocol,
    address: str,
    port: int,
    timeout: float = ANSWERED,
    source: tuple[str, int] = ("", 0),
    create: Create = socket.socket,
) -> str:
    """Connect, send "?" and return the answer. Raises OSError; ConnectionResetError without an answer."""
    with dial(protocol, address, port, timeout, source, create) as client:
        client.sendall(b"?")
        answer = client.recv(1 << 16)
    if not answer:
        raise ConnectionResetError(f"{address} port {port} closed the connection without an answer")
    return answer.decode()


def exchange(client: socket.socket, payload: bytes) -> bytes:
    """Send the payload by a connected TCP socket to a `serve_echo` server; return as many received bytes.

    Raises OSError; ConnectionResetError if the connection ends before.
    """
    sender = threading.Thread(target=client.sendall, args=(payload,), daemon=True)
    sender.start()
    received = bytearray()
    while len(received) < len(payload):
        chunk = client.recv(1 << 18)
        if not chunk:
            raise ConnectionResetError(f"the connection ended after {len(received)} bytes")
        received += chunk
    sender.join()
    return bytes(received)
