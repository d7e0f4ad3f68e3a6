"""The items that threads put into the inbox of the control thread."""

import queue
from typing import NamedTuple

from ebpfproxy.api.event import Event


class Received(NamedTuple):
    """An event, and the time of the monotonic clock at which it was received."""

    moment: float
    event: Event


class Died(NamedTuple):
    """A source has ended, by an error or by itself."""

    source: str
    error: BaseException


class Stop(NamedTuple):
    """A signal ends the agent."""

    signal: str


class Drain(NamedTuple):
    """A signal asks an edge to withdraw its addresses, and to end later."""

    signal: str


class Reload(NamedTuple):
    """The configuration must be read again."""

    reason: str


class Notified(NamedTuple):
    """Another program may have changed the kernel."""


Item = Received | Died | Stop | Drain | Reload | Notified
Inbox = queue.SimpleQueue[Item]
