"""A pod of the lab: a network namespace with addresses, and its servers and clients."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from ebpfproxy.lab import sockets
from ebpfproxy.lab.netns import Call, Netns
from ebpfproxy.model.address import Protocol


class Pod(Netns):
    """A network namespace with one address of each family. The node and the outside client are Pods, too.

    `device` is the node's end of the pod's veth pair: "" for the node, "eth0" for the outside client.
    """

    def __init__(self, name: str, namespace: str, cgroup: Path, v4: str, v6: str, device: str = "") -> None:
        super().__init__(name, namespace, cgroup)
        self.v4 = v4
        self.v6 = v6
        self.device = device

    def serve(
        self, protocol: Protocol, port: int, reply: str | sockets.Reply = "", address: str = "::"
    ) -> Call[None]:
        """Answer every chunk or datagram on `port` with `reply`, by default the pod's name.

        Returns once the server is ready. The server runs until it is killed or the lab ends.
        Raises OSError if the port is in use.
        """
        text = reply or self.name
        answer = text if callable(text) else lambda _address, _port: text
        return self._serve(protocol, port, address, lambda listener: sockets.serve(listener, answer))

    def serve_http(self, port: int, body: str = "") -> Call[None]:
        """Answer every GET on `port` with `body`, by default the pod's name; otherwise as `serve`."""
        return self._serve(
            Protocol.TCP, port, "::", lambda listener: sockets.serve_http(listener, body or self.name)
        )

    def serve_echo(self, protocol: Protocol, port: int, address: str = "::") -> Call[None]:
        """Answer "?" with the pod's name and the client's address as the pod sees it; echo everything else.

        Otherwise as `serve`.
        """

        def answer(client: str, _port: int) -> str:
            return f"{self.name} {client}"

        return self._serve(protocol, port, address, lambda listener: sockets.serve_echo(listener, answer))

    def ask(self, protocol: Protocol, address: str, port: int, timeout: float = sockets.ANSWERED) -> str:
        """Send a request from this pod and return the server's answer. Raises OSError."""
        return self.call(lambda: sockets.ask(protocol, address, port, timeout))

    def _serve(
        self, protocol: Protocol, port: int, address: str, serve: Callable[[socket.socket], None]
    ) -> Call[None]:
        def child(ready: int) -> None:
            listener = sockets.listening(protocol, port, address)
            os.write(ready, b"!")
            os.close(ready)
            serve(listener)

        return self.start_until_ready(child)
