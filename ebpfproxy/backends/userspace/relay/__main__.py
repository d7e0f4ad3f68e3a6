"""Runs a relay: `python -m ebpfproxy.backends.userspace.relay FD`. FD is the agent's control socket."""

import asyncio
import contextlib
import gc
import os
import resource
import socket
import sys
from pathlib import Path

from ebpfproxy.backends.userspace.messages import READERS
from ebpfproxy.backends.userspace.relay.control import Control

_NAME = "ebpfproxy-relay"  # as `ps` shows it: at most 15 bytes
_FILES = 1 << 20


async def _run(control: socket.socket) -> None:
    """Relay until the agent ends."""
    relay = Control(asyncio.get_running_loop())
    await asyncio.start_unix_server(relay.serve_reader, path=f"\0{READERS}{os.getpid()}")
    gc.freeze()
    await relay.follow(control)


def _raise_limits() -> None:
    """A relayed connection takes two file descriptors, and each listener one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (max(hard, _FILES), hard):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            return


def main() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(_NAME)
    _raise_limits()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        asyncio.run(_run(control))
    os._exit(0)  # without the end of each connection: the kernel closes all sockets


if __name__ == "__main__":
    main()
