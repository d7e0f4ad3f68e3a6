"""The results of canary connections, as values."""

import enum
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.diagnose.explain.result import Destination
from ebpfproxy.model.address import Address
from ebpfproxy.model.connection import Connection, Translation

Locate = Callable[[Connection], Translation | None]
"""Says where the kernel sends a connection; None if it does not translate it."""


class State(enum.Enum):
    """Whether a path works. UNPROVEN: the connection could not be made, for a reason that is not the path's.

    For example, the endpoint does not answer without the Service either.
    """

    WORKS = "works"
    FAILS = "fails"
    UNPROVEN = "unproven"


class Outcome(NamedTuple):
    """What a client saw, and what the kernel had for the connection before it was closed.

    - `error`: "" if the connection was established, or if a UDP client got no error.
    - `peer`: address and port that the client has as its peer, None without one.
    - `translation`: None if the kernel translates nothing, or if the client has no address.
    """

    error: str
    peer: tuple[Address, int] | None = None
    translation: Translation | None = None


class Result(NamedTuple):
    """One path. `client`, `place` and `service` as texts for readers.

    - `place`: what sees the connection first, for example "hook connect4".
    - `endpoint`: the one that the connection reached, or was sent to; "" if that is unknown.
    - `detail`: the reason of FAILS and UNPROVEN.
    """

    client: str
    destination: Destination
    service: str
    place: str
    state: State
    endpoint: str = ""
    detail: str = ""

    def __str__(self) -> str:
        facts = ", ".join(
            filter(None, (self.service, f"endpoint {self.endpoint}" if self.endpoint else "", self.detail))
        )
        return f"canary {self.client} -> {self.destination}, {self.place}: {self.state.value}: {facts}"
