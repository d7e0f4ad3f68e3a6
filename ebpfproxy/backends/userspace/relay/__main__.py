"""A relay process: `python -m ebpfproxy.backends.userspace.relay FD`. FD is the agent's control socket.

It answers requests of the agent and of other commands, which may only read, and ends with the agent.
"""

import asyncio
import contextlib
import gc
import os
import secrets
import socket
import sys
from pathlib import Path

import msgspec

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.messages import (
    LENGTH,
    Answer,
    Change,
    Connections,
    Content,
    Count,
    Counters,
    Done,
    Find,
    ListConnections,
    Read,
    Request,
    Start,
)
from ebpfproxy.backends.userspace.relay.held import Entries
from ebpfproxy.backends.userspace.relay.workload import Workload
from ebpfproxy.linux import descriptors
from ebpfproxy.linux.netlink import rtnetlink_watch

_DEVICES = "network devices"


def run(descriptor: int) -> None:
    """Relay until the agent closes its end of the control socket, which has this file descriptor."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(messages.NAME)
    descriptors.raise_limit()  # a connection takes two, and each listener one
    with socket.socket(fileno=descriptor) as control:
        asyncio.run(_run(control))
    os._exit(0)  # without the end of each connection: the kernel closes all sockets


async def _run(agent: socket.socket) -> None:
    """Answer requests until the agent ends or closes its socket."""
    loop, control = asyncio.get_running_loop(), _Control()

    async def serve_reader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if messages.is_own(writer.get_extra_info("socket")):
            await control.serve(reader, writer, may_change=False)
        writer.close()

    await asyncio.start_unix_server(serve_reader, path=f"\0{messages.READERS}{secrets.token_hex(8)}")
    gc.freeze()
    with rtnetlink_watch.subscribed(_DEVICES, rtnetlink_watch.LINKS) as notifications:
        loop.add_reader(notifications, control.devices_changed, notifications)
        await control.serve(*await asyncio.open_connection(sock=agent), may_change=True)


class _Control:
    """Answers requests. The first one of the agent creates the entries."""

    def __init__(self) -> None:
        self._entries: Entries | None = None

    def devices_changed(self, notifications: socket.socket) -> None:
        rtnetlink_watch.drain(_DEVICES, notifications)
        if self._entries:
            self._entries.devices_changed()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, may_change: bool
    ) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                request = messages.decode_request(await reader.readexactly(length))
                if not may_change and isinstance(request, Start | Change):
                    return
                writer.write(messages.encode(self._answer(request)))
                await writer.drain()
        except (EOFError, OSError, msgspec.MsgspecError):
            return

    def _answer(self, request: Request) -> Answer:
        if isinstance(request, Start):
            self._entries = Entries(Workload(asyncio.get_running_loop(), request))
            return Done()
        entries = self._entries
        if entries is None:
            raise EOFError
        connections, flows = entries.connections, entries.flows
        match request:
            case Change():
                return Done(entries.apply(request))
            case Read():
                return Content(entries.held())
            case Count():
                return Counters(connections.count(), flows.count(), dict(entries.work.counts))
            case ListConnections():
                found = connections.listed(request.most)
                return Connections(found + flows.listed(request.most - len(found)))
            case Find():
                of = flows if request.protocol == "UDP" else connections
                return of.found(request.client, request.frontend)


if __name__ == "__main__":
    run(int(sys.argv[1]))
