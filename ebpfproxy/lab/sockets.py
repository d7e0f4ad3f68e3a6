"""Small servers and clients over TCP and UDP of both families, to be run within a place."""

import asyncio
import errno
import http.server
import socket
import threading
from collections.abc import Callable
from typing import Any

from ebpfproxy.model.address import Protocol

Reply = Callable[[str, int], str]
"""From a client's address and port, as its server sees them, to the answer."""

_TYPES = {
    Protocol.TCP: socket.SOCK_STREAM,
    Protocol.UDP: socket.SOCK_DGRAM,
    Protocol.SCTP: socket.SOCK_STREAM,
}
_BACKLOG = 4096

ANSWERED = 20.0
"""Seconds for what is sure to be answered, on however busy a machine. Who expects silence waits less."""


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


def tell(listener: socket.socket, reply: Reply) -> None:
    """Answer "?" with `reply`, and everything else with itself, until the process is ended.

    A stream is one or the other by its first chunk. Of UDP replies the same holds as of `serve`.
    """
    if listener.type == socket.SOCK_DGRAM:
        while True:
            question, peer = listener.recvfrom(1 << 16)
            listener.sendto(_answer(reply, peer) if question == b"?" else question, peer)
    asyncio.run(_tell_streams(listener, reply))


async def _tell_streams(listener: socket.socket, reply: Reply) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = chunk = await reader.read(1 << 16)
            answer = _answer(reply, writer.get_extra_info("peername"))
            while chunk:
                writer.write(answer if first == b"?" else chunk)
                await writer.drain()
                chunk = await reader.read(1 << 16)
        except OSError:
            pass  # the client's business; a way that is gone is none of ConnectionError
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


def dial(
    protocol: Protocol, address: str, port: int, timeout: float = ANSWERED, source: tuple[str, int] = ("", 0)
) -> socket.socket:
    """A connected socket; for UDP one that has a peer. Raises OSError, TimeoutError included.

    `source` is the address and the port to dial from, "" and 0 for any.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    client = socket.socket(family, _TYPES[protocol], protocol)
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
    protocol: Protocol, address: str, port: int, timeout: float = ANSWERED, source: tuple[str, int] = ("", 0)
) -> str:
    """Dial, say something, and return the answer. Raises OSError; ConnectionResetError for none."""
    with dial(protocol, address, port, timeout, source) as client:
        client.sendall(b"?")
        answer = client.recv(1 << 16)
    if not answer:
        raise ConnectionResetError(f"{address} port {port} closed the connection without an answer")
    return answer.decode()


def ask_unconnected(address: str, port: int, timeout: float = ANSWERED) -> tuple[str, tuple[str, int]]:
    """Ask by UDP from a socket without a peer; return the answer, and its source."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(timeout)
        client.sendto(b"?", (address, port))
        answer, peer = client.recvfrom(1 << 16)
    return answer.decode(), (peer[0], peer[1])


def exchange(client: socket.socket, payload: bytes) -> bytes:
    """Send it by a connected TCP socket to a server that `tell`s, and return as many bytes as it was.

    Raises OSError; ConnectionResetError where the connection ends before.
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


def exchange_datagram(client: socket.socket, payload: bytes, attempts: int = 5) -> bytes:
    """Send it by a connected UDP socket to a server that `tell`s, and return what comes back.

    Another attempt each time that nothing comes, or that it was too long: the first datagrams over a
    narrow path are lost, and tell both ends how narrow it is. Raises TimeoutError after the last one.
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
