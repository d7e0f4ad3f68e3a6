"""The process of a relay: its name, its limits, and its end with the agent."""

import asyncio
import contextlib
import gc
import os
import secrets
import socket
from pathlib import Path

from ebpfproxy.backends.userspace.messages import READERS
from ebpfproxy.backends.userspace.relay.control import Control
from ebpfproxy.linux import descriptors

NAME = "ebpfproxy-relay"
"""As `ps` shows it: at most 15 bytes."""


def run(descriptor: int) -> None:
    """Relay until the agent closes its end of the control socket, which has this file descriptor."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    descriptors.raise_limit()  # a connection takes two, and each listener one
    with socket.socket(fileno=descriptor) as control:
        asyncio.run(_run(control))
    os._exit(0)  # without the end of each connection: the kernel closes all sockets


async def _run(control: socket.socket) -> None:
    """Relay until the agent ends."""
    relay = Control(asyncio.get_running_loop())
    await asyncio.start_unix_server(relay.serve_reader, path=f"\0{READERS}{secrets.token_hex(8)}")
    gc.freeze()
    await relay.follow(control)
