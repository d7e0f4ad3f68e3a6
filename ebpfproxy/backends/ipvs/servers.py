"""Virtual and real servers in the kernel: written, and real servers that are not wanted are removed
gracefully.

A real server of TCP or SCTP that is not wanted any more gets weight 0: no new connection, and those it has go
on. It is deleted once it has none, which is looked at after each reading that found it so; so nothing has to
be remembered from run to run. Not at once, for another CPU may have chosen it, and not counted the connection
yet, which would be lost. One that comes back meanwhile gets its weight again. A flow of UDP has no end, so a
real server of UDP is deleted at once, and so is a virtual server with all it has.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.backends.ipvs.entries import Server, ServerEntry
from ebpfproxy.errors import AlreadyExists, KernelError, NotFound
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.ipvs.ipvs import Operation
from ebpfproxy.linux.ipvs.messages import Listed, RealServer, ServerKey, VirtualServer
from ebpfproxy.model.address import Protocol, family
from ebpfproxy.plan.service_plan import Frontend

Rejections = dict[Server, KernelError]


class _Held(NamedTuple):
    """`reals` in any order, those that are let go of included."""

    server: VirtualServer
    reals: tuple[RealServer, ...]

    @property
    def draining(self) -> frozenset[RealServer]:
        return frozenset(each for each in self.reals if not each.weight)


class Servers:
    """In the calling thread's network namespace."""

    def __init__(self) -> None:
        self._held: dict[Frontend, _Held] = {}
        self._draining: dict[Frontend, frozenset[RealServer]] = {}  # as the last reading found them
        self.reals = 0
        """How many real servers all have together, those that are let go of included."""

    def read(self, ours: Callable[[Frontend], bool]) -> dict[Server, ServerEntry]:
        """Those that are `ours`, or were put by us. Raises KernelError."""
        found = {Frontend(*key): listed for key, listed in ipvs.read().items()}
        self._held = {
            frontend: _held(listed)
            for frontend, listed in found.items()
            if frontend in self._held or ours(frontend)
        }
        self.reals = sum(len(held.reals) for held in self._held.values())
        self._draining = {each: gone for each, held in self._held.items() if (gone := held.draining)}
        return {Server(family(each.address), each): _entry(held) for each, held in self._held.items()}

    def put(self, puts: Mapping[Server, ServerEntry]) -> Rejections:
        """What was rejected. Where another program has changed the same meanwhile, it is read and tried
        again."""
        rejected = self._carry_out({key.frontend: self._changes(key.frontend, puts[key]) for key in puts})
        again = [key for key in puts if isinstance(rejected.get(key.frontend), AlreadyExists | NotFound)]
        if again:
            for key in again:
                self._read_one(key.frontend)
                del rejected[key.frontend]
            rejected |= self._carry_out(
                {key.frontend: self._changes(key.frontend, puts[key]) for key in again}
            )
        for key, entry in puts.items():
            if key.frontend in rejected:
                self._read_one(key.frontend)
            else:
                self._note(key.frontend, entry)
        return {key: rejected[key.frontend] for key in puts if key.frontend in rejected}

    def drop(self, drops: Iterable[Server]) -> Rejections:
        gone = [key for key in drops if key.frontend in self._held]
        rejected = self._carry_out(
            {key.frontend: [ipvs.delete_server(ServerKey(*key.frontend))] for key in gone}
        )
        failed = {
            key: rejected[key.frontend]
            for key in gone
            if not isinstance(rejected.get(key.frontend), NotFound | None)
        }
        for key in gone:
            if key not in failed:
                self._hold(key.frontend, None)
        return failed

    def let_go(self) -> None:
        """Delete the real servers that have ended, of those that were let go of when all was read last."""
        deletions: dict[Frontend, list[Operation]] = {}
        for frontend, previous in self._draining.items():
            key = ServerKey(*frontend)
            listed = self._read_one(frontend) if frontend in self._held else None
            ended = previous.intersection(_ended(listed)) if listed else ()
            deletions[frontend] = [ipvs.delete_real(key, each.address, each.port) for each in ended]
        self._draining = {}
        rejected = self._carry_out({each: ops for each, ops in deletions.items() if ops})
        for frontend, operations in deletions.items():
            if operations and frontend not in rejected:
                self._read_one(frontend)

    def _changes(self, frontend: Frontend, entry: ServerEntry) -> list[Operation]:
        held = self._held.get(frontend)
        server = _server(frontend, entry)
        if held is None:
            return [ipvs.add_server(server), *(ipvs.add_real(server.key, each) for each in entry.reals)]
        changes = [ipvs.change_server(server)] if held.server != server else []
        present = {(each.address, each.port): each for each in held.reals}
        for real in entry.reals:
            previous = present.pop((real.address, real.port), None)
            if previous is None:
                changes.append(ipvs.add_real(server.key, real))
            elif previous != real:
                changes.append(ipvs.change_real(server.key, real))
        for leaving in present.values():
            if frontend.protocol is Protocol.UDP:
                changes.append(ipvs.delete_real(server.key, leaving.address, leaving.port))
            elif leaving.weight:
                changes.append(ipvs.change_real(server.key, leaving._replace(weight=0)))
        return changes

    def _note(self, frontend: Frontend, entry: ServerEntry) -> None:
        held = self._held.get(frontend)
        leaving: tuple[RealServer, ...] = ()
        if held and frontend.protocol is not Protocol.UDP:
            wanted = {(each.address, each.port) for each in entry.reals}
            leaving = tuple(
                each._replace(weight=0) for each in held.reals if (each.address, each.port) not in wanted
            )
        self._hold(frontend, _Held(_server(frontend, entry), entry.reals + leaving))

    def _read_one(self, frontend: Frontend) -> Listed | None:
        try:
            listed = ipvs.read_one(ServerKey(*frontend))
        except NotFound:
            self._hold(frontend, None)
            return None
        self._hold(frontend, _held(listed))
        return listed

    def _hold(self, frontend: Frontend, held: _Held | None) -> None:
        previous = self._held.pop(frontend, None)
        if previous:
            self.reals -= len(previous.reals)
        if held:
            self._held[frontend] = held
            self.reals += len(held.reals)

    @staticmethod
    def _carry_out(operations: Mapping[Frontend, list[Operation]]) -> dict[Frontend, KernelError]:
        """The first rejection of each."""
        flat = [(frontend, each) for frontend, ops in operations.items() for each in ops]
        rejected: dict[Frontend, KernelError] = {}
        for rejection in ipvs.apply([each for _, each in flat]):
            rejected.setdefault(flat[rejection.position][0], rejection.error)
        return rejected


def _held(listed: Listed) -> _Held:
    return _Held(listed.server, tuple(listed.reals))


def _entry(held: _Held) -> ServerEntry:
    server = held.server
    reals = tuple(sorted(each for each in held.reals if each.weight))
    return ServerEntry(server.scheduler, server.flags, server.persistence, reals, server.prefix)


def _server(frontend: Frontend, entry: ServerEntry) -> VirtualServer:
    key = ServerKey(*frontend)
    return VirtualServer(key, entry.scheduler, entry.flags, entry.persistence_s, entry.prefix)


def _ended(listed: Listed) -> Iterator[RealServer]:
    for real, connections in listed.reals.items():
        if not real.weight and not any(connections):
            yield real
