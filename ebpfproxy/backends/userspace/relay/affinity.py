"""Session affinity of a relay: which endpoint each client got last.

All connections of a client to a ServicePort with affinity are accepted by the same relay: the kernel selects
it by the client's address (see `held.py`). So relays need not share this table.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from ebpfproxy.backends.userspace.relay.target import Target


class _Choice(NamedTuple):
    target: Target
    used: float


class Affinity:
    """A table of limited size. The least recently active client is forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._choices: OrderedDict[tuple[Hashable, str], _Choice] = OrderedDict()

    def get(self, service: Hashable, client: str, timeout: float, now: float) -> Target | None:
        """Return the endpoint of a client that was active within `timeout` seconds, else None."""
        choice = self._choices.get((service, client))
        if choice is None:
            return None
        if now - choice.used > timeout:
            del self._choices[service, client]
            return None
        return choice.target

    def set(self, service: Hashable, client: str, target: Target, now: float) -> None:
        """The client is active now, and uses this endpoint."""
        self._choices[service, client] = _Choice(target, now)
        self._choices.move_to_end((service, client))
        if len(self._choices) > self._most:
            self._choices.popitem(last=False)
