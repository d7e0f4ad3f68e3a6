"""Reads what mode userspace serves, from the relays and the kernel, in any process of the node."""

import contextlib
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ebpfproxy.backends.interface import Inspection
from ebpfproxy.backends.userspace import addresses, messages, redirects
from ebpfproxy.backends.userspace.entries import Balancing, Entry, Key, Listen
from ebpfproxy.backends.userspace.messages import (
    READERS,
    Answer,
    Connection,
    Connections,
    Content,
    Find,
    ListConnections,
    Read,
    Request,
)
from ebpfproxy.backends.userspace.redirects import State
from ebpfproxy.backends.userspace.relays import common_entries, entries_of
from ebpfproxy.backends.userspace.rendering import render
from ebpfproxy.errors import NotFound
from ebpfproxy.model import connection as model
from ebpfproxy.model.address import Family, family, format_address, format_endpoint, parse_endpoint
from ebpfproxy.model.connection import Translation
from ebpfproxy.plan.planned_endpoints import PlannedEndpoints
from ebpfproxy.plan.service_plan import NodePlan, PlanContext, ServicePortPlan

_SOCKETS = Path("/proc/thread-self/net/unix")
_PATIENCE = 10.0  # seconds for an answer
_ACCEPT_SECONDS, _PAUSE = 1.0, 0.01  # until a connection is accepted, and between two questions


class UserspaceInspection(Inspection[Key, Entry]):
    """Relays and redirects in the calling thread's network namespace."""

    def __init__(self, context: PlanContext) -> None:
        """Raises NotFound if no relay runs and no address is left."""
        self.context = context
        self._redirected: frozenset[Family] = frozenset()
        if not _relays() and not addresses.read():
            raise NotFound("mode userspace does not serve on this node: no relay process runs")
        self.read()

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        return render(plans, node, self._redirected)

    def read(self) -> dict[Key, Entry]:
        """Return the entries that are in force. Raises KernelError.

        A listener at another port than that of its frontend shows that the agent redirects its family.
        """
        entries = relayed()
        listening = ((key, each) for key, each in entries.items() if isinstance(key, Listen))
        moved = {key.family for key, each in listening if redirects.state_of(key, each) is State.RELAYED}
        states = redirects.read_all()
        self._redirected = frozenset(moved | {family(each.address) for each in states or ()})
        if states is not None:
            entries = redirects.in_force(entries, states, self._redirected)
        entries.update(addresses.read())
        return entries

    def shown(self, key: Key, entry: Any) -> Any:
        """Return an entry for readers: endpoints and addresses as texts."""
        if isinstance(key, Listen) and isinstance(entry, bool):
            return "none, packets are rejected" if entry else "none"
        return shown(entry)

    def endpoint_of(self, connection: model.Connection) -> Translation | None:
        return endpoint_of(connection)

    def close(self) -> None:
        """Nothing is open between calls."""


def relayed() -> dict[Key, Entry]:
    """Return the entries that all relays hold. Empty if no relay runs."""
    found = [entries_of(each.held) for each in _ask_all(Read()) if isinstance(each, Content)]
    return common_entries(found, {key for each in found for key in each})


def endpoint_of(connection: model.Connection) -> Translation | None:
    """As the relay that accepted it has it. None if no endpoint accepted the connection.

    A relay may accept a moment after the client is connected, and tries several endpoints.
    """
    end = time.monotonic() + _ACCEPT_SECONDS
    while True:
        found, is_dialing = _endpoint_of(connection)
        if found or (not is_dialing and time.monotonic() > end):
            return found
        time.sleep(_PAUSE)


def _endpoint_of(connection: model.Connection) -> tuple[Translation | None, bool]:
    """Return where a relay sends the connection, and whether it still tries endpoints."""
    client, frontend = format_endpoint(*connection.client), format_endpoint(*connection.frontend)
    found = _ask_all(Find(connection.protocol.name, client, frontend))
    answers = [each for each in found if isinstance(each, Connections)]
    for each in (each for answer in answers for each in answer.connections):
        return Translation(parse_endpoint(each.endpoint)), False
    return None, any(answer.dialing for answer in answers)


def shown(entry: Any) -> Any:
    """Return an entry for readers.

    >>> from ebpfproxy.model.address import parse_address
    >>> from ebpfproxy.plan.planned_endpoints import PlannedEndpoint
    >>> one = PlannedEndpoint(parse_address("10.0.0.1"), 80, cluster=True, local=False, on_node=False)
    >>> shown(Balancing(PlannedEndpoints([one]).rows)).rows, shown((one.address,))
    (('10.0.0.1:80 cluster',), ('10.0.0.1',))
    """
    if isinstance(entry, Balancing):
        return entry._replace(rows=tuple(_endpoints(entry.rows)))  # type: ignore[arg-type]
    if isinstance(entry, tuple) and all(isinstance(each, bytes) for each in entry):
        return tuple(map(format_address, entry))
    return entry


def _endpoints(rows: bytes) -> Iterator[str]:
    for each in PlannedEndpoints.packed(rows):
        scopes = [name for name, used in (("cluster", each.cluster), ("local", each.local)) if used]
        yield " ".join((format_endpoint(each.address, each.port), *scopes))


def connections(most: int) -> list[Connection]:
    """Return up to `most` open connections and UDP flows of each relay. Empty if no relay runs."""
    answers = _ask_all(ListConnections(most))
    return [one for each in answers if isinstance(each, Connections) for one in each.connections]


def _relays() -> list[str]:
    """Return the addresses of the relays in this network namespace."""
    prefix = f"@{READERS}"
    words = (line.split() for line in _SOCKETS.read_text().splitlines())
    return sorted({f"\0{each[-1][1:]}" for each in words if each[-1].startswith(prefix)})


def _ask_all(request: Request) -> list[Answer]:
    """Ask each relay of this process's user. A relay that ends meanwhile gives no answer."""
    answers = []
    for address in _relays():
        with contextlib.suppress(OSError, EOFError), socket.socket(socket.AF_UNIX) as relay:
            relay.setblocking(False)  # a socket of another user may have a full queue
            relay.connect(address)
            if messages.is_own(relay):
                relay.settimeout(_PATIENCE)
                answers.append(messages.ask(relay, request))
    return answers
