"""The result of an explanation, as values. `tree` and JSON of `cli/explain.py` show them."""

import dataclasses
import enum
from typing import NamedTuple

from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.situation import Served
from ebpfproxy.model.address import Address, Protocol, format_address, format_endpoint
from ebpfproxy.plan.reason import AnyReason


class ClientClass(enum.Enum):
    """The class of clients, as a `FrontendPlan` has a result for each."""

    POD = "pod"
    NODE = "node"
    OUTSIDE = "outside"


class Verdict(enum.Enum):
    """What happens to a connection.

    - ROUTED: no Service has the destination; the packet is routed as any other.
    - REACHES_NODE: no Service has the destination, and the packet is for the node itself.
    """

    CONNECTS = "connects"
    REJECTED = "rejected"
    DROPPED = "dropped"
    REJECTED_OR_DROPPED = "rejected or dropped"
    ROUTED = "routed"
    REACHES_NODE = "reaches the node"
    ANSWERED = "answered"
    NO_SERVICE = "not served"


class Destination(NamedTuple):
    """What a client connects to. `port` is 0 and `protocol` None for an echo request (ping)."""

    address: Address
    port: int
    protocol: Protocol | None

    @property
    def is_echo(self) -> bool:
        return self.protocol is None

    def __str__(self) -> str:
        if self.protocol is None:
            return f"{format_address(self.address)}/ICMP"
        return f"{format_endpoint(self.address, self.port)}/{self.protocol.name}"


class Via(enum.Enum):
    """What translates a connection: a socket hook, the packets' path, a relay process, or nothing."""

    SOCKET = "socket"
    PACKET = "packet"
    RELAY = "relay"
    NOTHING = "nothing"


class Path(NamedTuple):
    """`place`: what sees the connection first. `exception`: why it is not a socket hook, in mode ebpf; in
    mode nftables, what its later packets pass instead.
    """

    via: Via
    why: Reason
    place: str
    exception: Reason | None = None


class Step(NamedTuple):
    """One step: what was found, and why. `details` are lines that belong to it."""

    reason: AnyReason
    text: str
    details: tuple[str, ...] = ()


class EndpointResult(NamedTuple):
    """One endpoint of the Service.

    - `used`: new connections of this client may use it. `works`: it then answers.
    - `masqueraded`: None if it is not used, or unknown. `why_masquerade` is None if it is not used.
    - `seen`: the client's addresses that the server may see. Empty if it is not used, or unknown.
    - `node`: "" if its EndpointSlice names none. `port` is 0 if its EndpointSlice has no such port.
    """

    address: Address
    port: int
    reason: AnyReason
    used: bool
    works: bool = True
    node: str = ""
    zones: tuple[str, ...] = ()
    masqueraded: bool | None = None
    why_masquerade: Reason | None = None
    seen: tuple[Address, ...] = ()

    def __str__(self) -> str:
        return format_endpoint(self.address, self.port) if self.port else format_address(self.address)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What happens to a connection from one client to one destination.

    - `destination`: None for a Service that no proxy serves.
    - `service`: "namespace/name:port" of the ServicePort, "" if none has the destination.
    - `why`: the reason of the verdict.
    - `endpoints`: every endpoint of the Service, sorted by address and port. Empty if no Service is reached.
    - `disagreements`: lines, one for each difference between plan and kernel.
    - `served`, `path`: the frontend and the path of the connection; None if no Service is reached.
    - `is_blocked`: rules of another program certainly drop its packets to endpoints.
    - `is_other_service`: another Service has the frontend than the one that was asked for.
    """

    destination: Destination | None
    service: str
    verdict: Verdict
    why: AnyReason
    steps: tuple[Step, ...]
    endpoints: tuple[EndpointResult, ...] = ()
    disagreements: tuple[str, ...] = ()
    served: Served | None = None
    path: Path | None = None
    is_other_service: bool = False
    is_blocked: bool = False

    @property
    def works(self) -> bool:
        """Whether the client gets an answer of an endpoint, whichever one is selected."""
        if self.verdict is Verdict.ANSWERED:
            return True
        used = [each for each in self.endpoints if each.used]
        connects = self.verdict is Verdict.CONNECTS and not (self.is_other_service or self.is_blocked)
        return connects and all(each.works for each in used)
