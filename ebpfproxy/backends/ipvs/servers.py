"""Reads and writes virtual and real servers, and removes real servers gracefully.

A real server of TCP or SCTP that is removed first gets weight 0: it gets no new connections, and open ones
continue. It is deleted once it has no connections, which is checked after each read that found weight 0. So
no state must persist across runs. It is not deleted at once, since another CPU may have selected it without
having counted the connection yet, which would be lost. A real server that is added again gets its weight
back.

A UDP flow has no end, so a real server of UDP is deleted at once. So is a virtual server with all its real
servers.
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


class _KnownServer(NamedTuple):
    """A known virtual server. `reals` in any order, including those that are draining."""

    server: VirtualServer
    reals: tuple[RealServer, ...]

    @property
    def draining(self) -> frozenset[RealServer]:
        return frozenset(each for each in self.reals if not each.weight)


class Servers:
    """The virtual servers in the calling thread's network namespace."""

    def __init__(self) -> None:
        self._known: dict[Frontend, _KnownServer] = {}
        self._draining: dict[Frontend, frozenset[RealServer]] = {}  # at the last read
        self.reals = 0
        """The number of real servers of all virtual servers, including those that are draining."""

    def read(self, is_own: Callable[[Frontend], bool]) -> dict[Server, ServerEntry]:
        """Return the virtual servers that are own according to `is_own`, or that were put. Raises
        KernelError.
        """
        found = {Frontend(*key): listed for key, listed in ipvs.read().items()}
        self._known = {
            frontend: _known_server(listed)
            for frontend, listed in found.items()
            if frontend in self._known or is_own(frontend)
        }
        self.reals = sum(len(known.reals) for known in self._known.values())
        self._draining = {
            each: draining for each, known in self._known.items() if (draining := known.draining)
        }
        return {Server(family(each.address), each): _entry(known) for each, known in self._known.items()}

    def put(self, puts: Mapping[Server, ServerEntry]) -> Rejections:
        """Write virtual servers and return what was rejected. If another program has changed one since the
        last read, read it and retry.
        """
        rejected = self._apply({key.frontend: self._changes(key.frontend, puts[key]) for key in puts})
        retried = [key for key in puts if isinstance(rejected.get(key.frontend), AlreadyExists | NotFound)]
        if retried:
            for key in retried:
                self._read_one(key.frontend)
                del rejected[key.frontend]
            rejected |= self._apply({key.frontend: self._changes(key.frontend, puts[key]) for key in retried})
        for key, entry in puts.items():
            if key.frontend in rejected:
                self._read_one(key.frontend)
            else:
                self._record(key.frontend, entry)
        return {key: rejected[key.frontend] for key in puts if key.frontend in rejected}

    def drop(self, drops: Iterable[Server]) -> Rejections:
        existing = [key for key in drops if key.frontend in self._known]
        rejected = self._apply(
            {key.frontend: [ipvs.delete_server(ServerKey(*key.frontend))] for key in existing}
        )
        failed = {
            key: rejected[key.frontend]
            for key in existing
            if not isinstance(rejected.get(key.frontend), NotFound | None)
        }
        for key in existing:
            if key not in failed:
                self._remember(key.frontend, None)
        return failed

    def delete_drained(self) -> None:
        """Delete the real servers that have ended, among those that were draining at the last read."""
        deletions: dict[Frontend, list[Operation]] = {}
        for frontend, previous in self._draining.items():
            key = ServerKey(*frontend)
            listed = self._read_one(frontend) if frontend in self._known else None
            ended = previous.intersection(_ended(listed)) if listed else ()
            deletions[frontend] = [ipvs.delete_real(key, each.address, each.port) for each in ended]
        self._draining = {}
        rejected = self._apply({each: ops for each, ops in deletions.items() if ops})
        for frontend, operations in deletions.items():
            if operations and frontend not in rejected:
                self._read_one(frontend)

    def _changes(self, frontend: Frontend, entry: ServerEntry) -> list[Operation]:
        known = self._known.get(frontend)
        server = _server(frontend, entry)
        if known is None:
            return [ipvs.add_server(server), *(ipvs.add_real(server.key, each) for each in entry.reals)]
        changes = [ipvs.change_server(server)] if known.server != server else []
        present = {(each.address, each.port): each for each in known.reals}
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

    def _record(self, frontend: Frontend, entry: ServerEntry) -> None:
        known = self._known.get(frontend)
        leaving: tuple[RealServer, ...] = ()
        if known and frontend.protocol is not Protocol.UDP:
            wanted = {(each.address, each.port) for each in entry.reals}
            leaving = tuple(
                each._replace(weight=0) for each in known.reals if (each.address, each.port) not in wanted
            )
        self._remember(frontend, _KnownServer(_server(frontend, entry), entry.reals + leaving))

    def _read_one(self, frontend: Frontend) -> Listed | None:
        try:
            listed = ipvs.read_one(ServerKey(*frontend))
        except NotFound:
            self._remember(frontend, None)
            return None
        self._remember(frontend, _known_server(listed))
        return listed

    def _remember(self, frontend: Frontend, known: _KnownServer | None) -> None:
        previous = self._known.pop(frontend, None)
        if previous:
            self.reals -= len(previous.reals)
        if known:
            self._known[frontend] = known
            self.reals += len(known.reals)

    @staticmethod
    def _apply(operations: Mapping[Frontend, list[Operation]]) -> dict[Frontend, KernelError]:
        """Apply the operations, and return the first error of each frontend."""
        flat = [(frontend, each) for frontend, ops in operations.items() for each in ops]
        rejected: dict[Frontend, KernelError] = {}
        for rejection in ipvs.apply([each for _, each in flat]):
            rejected.setdefault(flat[rejection.position][0], rejection.error)
        return rejected


def _known_server(listed: Listed) -> _KnownServer:
    return _KnownServer(listed.server, tuple(listed.reals))


def _entry(known: _KnownServer) -> ServerEntry:
    server = known.server
    reals = tuple(sorted(each for each in known.reals if each.weight))
    return ServerEntry(server.scheduler, server.flags, server.persistence, reals, server.prefix)


def _server(frontend: Frontend, entry: ServerEntry) -> VirtualServer:
    key = ServerKey(*frontend)
    return VirtualServer(key, entry.scheduler, entry.flags, entry.persistence_s, entry.prefix)


def _ended(listed: Listed) -> Iterator[RealServer]:
    for real, connections in listed.reals.items():
        if not real.weight and not any(connections):
            yield real
