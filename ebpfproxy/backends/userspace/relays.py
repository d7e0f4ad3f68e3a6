"""The relay processes: starts, controls and replaces them.

A relay ends with the agent, and so do its connections. A relay that ends by itself is replaced; the others
serve meanwhile. The kernel removes its sockets from their groups: the last socket of a group takes the place
of the removed one (reuseport_detach_sock() in net/core/sock_reuseport.c), and the sockets of the new relay
come last. `_order` follows that, since session affinity depends on it (see `relay/held.py`).
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.entries import Balanced, Entry, Key, Listen, NodePorts, UserspaceSettings
from ebpfproxy.backends.userspace.messages import (
    Answer,
    Change,
    Content,
    Count,
    Counters,
    Done,
    Failure,
    Held,
    Read,
    Request,
    Start,
)
from ebpfproxy.errors import KernelError, Rejected, Unsupported
from ebpfproxy.linux.child import Child
from ebpfproxy.log import Logger

log = Logger(__name__)

REPLACED = "Relay process ended, started another one"
"""Its connections ended. `code` is its exit code, or the negative number of a signal."""
NOT_REPLACED = "Cannot start a relay process, retrying"
"""The other relays serve meanwhile, if there are any. Retried every second."""

_MODULE = "ebpfproxy.backends.userspace.relay"
_PATIENCE = 20.0  # seconds for an answer: a relay without one is replaced
_PAUSE = 1.0  # seconds between two attempts to start a relay


_HINTS = {
    errno.EADDRINUSE: "another program listens at this port, perhaps at all addresses: restrict it to the "
    "addresses that it needs; or a client of the node has this port: it is tried again",
    errno.EACCES: "run as root, or with CAP_NET_BIND_SERVICE",
    errno.EMFILE: "raise the limit of open files (RLIMIT_NOFILE) of the agent",
}


class Relays:
    """All relays of this agent. Any thread may call methods."""

    def __init__(self, settings: UserspaceSettings, changed: Callable[[], object]) -> None:
        """`changed` is called when a relay was replaced."""
        self._settings = settings
        self._changed = changed
        self._lock = threading.RLock()
        self._order: list[tuple[int, Child]] = []
        self._entries: dict[Key, Entry] = {}
        self._is_open = False
        self.replaced = 0
        """How many relays were replaced."""

    def open(self) -> None:
        """Start the relays. Raises KernelError; none runs then."""
        with self._lock:
            self._is_open, self._entries = True, {}
            started: list[tuple[int, Child]] = []
            try:
                for number in range(self._settings.relays):
                    started.append((number, Child(_MODULE)))
                for number, child in started:  # they start at the same time
                    self._admit(number, child)
            except BaseException:
                self._order = started
                self.close()
                raise

    def close(self) -> None:
        """End the relays with their connections. Does nothing if not open."""
        with self._lock:
            self._is_open = False
            ending, self._order = self._order, []
            for _, child in ending:
                child.socket.close()
            for _, child in ending:
                child.end()

    def apply(self, puts: Mapping[Key, Entry], drops: Collection[Key]) -> dict[Listen, Failure]:
        """Put and drop entries in all relays; return where a relay does not listen."""
        with self._lock:
            self._entries.update(puts)
            for key in drops:
                self._entries.pop(key, None)
            change = Change(
                _held(puts),
                [key for key in drops if isinstance(key, Listen)],
                [key for key in drops if isinstance(key, Balanced)],
            )
            failures: dict[Listen, Failure] = {}
            for answer in self._ask_all(change):
                if isinstance(answer, Done):
                    failures |= {each.key: each for each in answer.failures}
            return failures

    def read(self) -> dict[Key, Entry]:
        """Return the entries that all relays hold, and those that only some hold but no relay should.

        Raises Rejected if no relay answers.
        """
        with self._lock:
            answers = self._ask_all(Read())
            wanted = frozenset(self._entries)
        found = [entries_of(each.held) for each in answers if isinstance(each, Content)]
        if not found:
            raise Rejected("cannot read the entries of the relays: none answers")
        return common_entries(found, wanted)

    def counters(self) -> Counters:
        """Return the sums of the counters of all relays."""
        with self._lock:
            answers = [each for each in self._ask_all(Count()) if isinstance(each, Counters)]
        events: dict[str, int] = {}
        for answer in answers:
            for name, count in answer.events.items():
                events[name] = events.get(name, 0) + count
        return Counters(
            sum(each.connections for each in answers), sum(each.udp_flows for each in answers), events
        )

    def pids(self) -> list[int]:
        """Return the process IDs of the relays."""
        with self._lock:
            return [child.pid for _, child in self._order]

    def _ask_all(self, request: Request) -> list[Answer]:
        """Ask one relay after the other. A relay that does not answer is killed, and then replaced."""
        answers = (self._ask(child, request) for _, child in list(self._order))
        return [each for each in answers if each is not None]

    @staticmethod
    def _ask(child: Child, request: Request) -> Answer | None:
        try:
            return messages.ask(child.socket, request)
        except (OSError, EOFError):
            child.kill()
            return None

    def _admit(self, number: int, child: Child) -> None:
        """Give a new relay its entries, and watch it. Raises Rejected if it does not answer; it is ended."""
        child.socket.settimeout(_PATIENCE)
        first = Start(number, self._settings), Change(_held(self._entries))
        if not all(self._ask(child, each) for each in first):
            child.end()
            raise Rejected(
                "cannot start a relay: it does not answer", "its output is in the log of the agent"
            )
        self._order.append((number, child))
        name = f"relay-{child.pid}"
        threading.Thread(target=self._watch, args=(number, child), name=name, daemon=True).start()

    def _watch(self, number: int, child: Child) -> None:
        """Wait for the end of a relay, and replace it unless it was to end."""
        code = child.wait()
        with self._lock:
            if not self._is_open or (number, child) not in self._order:
                return
            at = self._order.index((number, child))
            self._order[at] = self._order[-1]
            self._order.pop()
            child.socket.close()
        while True:
            try:
                if self._replace(number):
                    log.warning(REPLACED, pid=child.pid, code=code)
                    self._changed()
                return
            except KernelError as failure:
                log.error(NOT_REPLACED, reason=failure.message)
            time.sleep(_PAUSE)

    def _replace(self, number: int) -> bool:
        """Start a relay; return False if it is no longer necessary. Raises KernelError."""
        with self._lock:
            if not self._is_open or number in (each for each, _ in self._order):
                return False
            self._admit(number, Child(_MODULE))
            self.replaced += 1
            return True


def _held(entries: Mapping[Key, Any]) -> Held:
    held = Held([], [], [])
    for key, entry in entries.items():
        match key:
            case NodePorts():
                held.node_ports.append((key, entry))
            case Balanced():
                held.services.append((key, entry))
            case Listen():
                held.listeners.append((key, entry))
    return held


def rejection(failure: Failure) -> KernelError:
    """Return why a relay does not listen, with what to do about it."""
    key: Listen = failure.key
    if failure.number == errno.EPROTONOSUPPORT:
        return Unsupported(
            f"cannot serve {key.frontend}: mode userspace relays TCP and UDP only", "use another mode"
        )
    reason = os.strerror(failure.number)
    return Rejected(f"cannot listen at {failure.address}: {reason}", _HINTS.get(failure.number, ""))


def entries_of(held: Held) -> dict[Key, Entry]:
    """Return what a relay holds, by key."""
    pairs: Iterable[tuple[Key, Entry]] = (*held.node_ports, *held.services, *held.listeners)
    return dict(pairs)


def common_entries(found: Sequence[Mapping[Key, Entry]], wanted: Collection[Key]) -> dict[Key, Entry]:
    """Return the entries that all relays hold, and those not in `wanted` that any holds.

    >>> from ebpfproxy.model.address import Family
    >>> key, other = NodePorts(Family.IPV4), NodePorts(Family.IPV6)
    >>> common_entries([{key: ()}, {}], [key]), common_entries([{key: ()}, {other: ()}], [other])
    ({}, {NodePorts(family=<Family.IPV4: 'IPv4'>): ()})
    """
    common: dict[Key, Entry] = {}
    for each in found:
        for key, entry in each.items():
            if key not in wanted or all(other.get(key) == entry for other in found):
                common[key] = entry
    return common
