"""The servers of a target's pods: they answer, or end the connection if the client requests it."""

import asyncio
import os
import socket
import struct
from typing import NamedTuple, Self

from ebpfproxy.lab import Pod, sockets
from ebpfproxy.lab.netns import Call
from ebpfproxy.model.address import Protocol

CLOSE, RESET = b"close", b"reset"
_AT_ONCE = struct.pack("ii", 1, 0)
"""struct linger: close() sends a reset."""


class Answer(NamedTuple):
    """Which pod answers, and the client's address and port as the pod sees them."""

    pod: str
    client: str
    port: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises ValueError for any other text, such as SILENT."""
        pod, client, port = text.split(" ")
        return cls(pod, client, int(port))


def serve_streams(pod: Pod, port: int) -> Call[None]:
    """Serve TCP until the lab ends. Returns once clients are answered."""

    def child(ready: int) -> None:
        listener = sockets.listening(Protocol.TCP, port)
        os.write(ready, b"!")
        asyncio.run(_serve(listener, pod.name))

    return pod.start_until_ready(child)


async def _serve(listener: socket.socket, name: str) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client, port, *_ = writer.get_extra_info("peername")
        answer = f"{name} {client.removeprefix('::ffff:')} {port}".encode()
        try:
            while (chunk := await reader.read(1 << 16)) not in (b"", CLOSE, RESET):
                writer.write(answer)
                await writer.drain()
            if chunk == RESET:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        except ConnectionError:
            pass  # the client ended the connection
        finally:
            writer.close()

    server = await asyncio.start_server(converse, sock=listener)
    await server.serve_forever()


def reset_at_close(sock: socket.socket) -> None:
    """Have close() send a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
