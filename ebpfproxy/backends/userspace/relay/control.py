"""Answers requests: those of the agent, and those of other commands, which may only read."""

import asyncio
import socket

import msgspec

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.messages import (
    LENGTH,
    Answer,
    Change,
    Connections,
    Content,
    Count,
    Done,
    Find,
    ListConnections,
    Read,
    Request,
    Start,
)
from ebpfproxy.backends.userspace.relay.held import Entries
from ebpfproxy.backends.userspace.relay.workload import Workload
from ebpfproxy.linux.netlink import rtnetlink_watch

_DEVICES = "network devices"


class Control:
    """Holds the relay's state, which the agent's first request creates."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._work: Workload | None = None

    async def follow(self, control: socket.socket) -> None:
        """Answer the agent's requests until it ends or closes its socket."""
        reader, writer = await asyncio.open_connection(sock=control)
        with rtnetlink_watch.subscribed(_DEVICES, rtnetlink_watch.LINKS) as notifications:
            self._loop.add_reader(notifications, self._devices_changed, notifications)
            try:
                await self._serve(reader, writer, may_change=True)
            finally:
                self._loop.remove_reader(notifications)

    def _devices_changed(self, notifications: socket.socket) -> None:
        rtnetlink_watch.drain(_DEVICES, notifications)
        if self._work:
            self._entries.devices_changed()

    async def serve_reader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of another command of the same user."""
        if messages.is_own(writer.get_extra_info("socket")):
            await self._serve(reader, writer, may_change=False)
        writer.close()

    async def _serve(
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
            self._work = Workload(self._loop, request)
            self._entries = Entries(self._work)
            return Done()
        work = self._work
        if work is None:
            raise EOFError
        match request:
            case Change():
                return Done(self._entries.apply(request))
            case Read():
                return Content(self._entries.held())
            case Count():
                return work.counters()
            case ListConnections():
                return Connections(work.listed(request.most))
            case Find():
                return work.found(request)
