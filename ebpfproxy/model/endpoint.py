"""EndpointSlice (discovery.k8s.io/v1): the fields that a service proxy reads."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

from ebpfproxy.model.address import Address, Family, Protocol
from ebpfproxy.model.service import NamespacedName


class Endpoint(NamedTuple):
    """One element of `endpoints`: its first address, its conditions and its hints.

    Conditions that are missing have the API's defaults. `node` is "" if nodeName is missing. `zones` and
    `nodes` are hints.forZones and hints.forNodes, empty without a hint. `own_pod`: targetRef is a Pod in the
    namespace of the EndpointSlice.

    Do not derive `ready` from `serving` and `terminating`: with publishNotReadyAddresses an endpoint can be
    both ready and terminating.
    """

    address: Address
    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node: str = ""
    zones: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    own_pod: bool = False


class EndpointState(NamedTuple):
    """An `Endpoint` without its address. Many endpoints have the same, and share one object."""

    ready: bool = True
    serving: bool = True
    terminating: bool = False
    node: str = ""
    zones: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    own_pod: bool = False


class Endpoints(Sequence[Endpoint]):
    """The `endpoints` of an EndpointSlice, immutable: 24 bytes for each instead of 160 as a tuple."""

    __slots__ = ("addresses", "states")

    def __init__(self, endpoints: Iterable[Endpoint] = ()) -> None:
        given = tuple(endpoints)
        self.addresses = b"".join(each.address for each in given)
        """All addresses, 16 bytes each."""
        self.states = tuple(EndpointState(*each[1:]) for each in given)
        """The states, in the order of the addresses."""

    @classmethod
    def packed(cls, addresses: bytes, states: tuple[EndpointState, ...]) -> "Endpoints":
        """Return the endpoints with these addresses, 16 bytes each, and states."""
        made = cls.__new__(cls)
        made.addresses, made.states = addresses, states
        return made

    def states_by_address(self) -> Iterator[tuple[Address, EndpointState]]:
        """Return address and state of each endpoint."""
        addresses = self.addresses
        starts = range(0, len(addresses), 16)
        return zip([Address(addresses[at : at + 16]) for at in starts], self.states, strict=True)

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[Endpoint]:
        return (Endpoint(address, *state) for address, state in self.states_by_address())

    @overload
    def __getitem__(self, index: int) -> Endpoint: ...
    @overload
    def __getitem__(self, index: slice) -> "Endpoints": ...
    def __getitem__(self, index: int | slice) -> "Endpoint | Endpoints":
        if isinstance(index, slice):
            return Endpoints(tuple(self)[index])
        number = range(len(self))[index]
        return Endpoint(Address(self.addresses[16 * number : 16 * number + 16]), *self.states[number])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Endpoints):
            return NotImplemented
        return self.addresses == other.addresses and self.states == other.states

    def __hash__(self) -> int:
        return hash((self.addresses, self.states))

    def __repr__(self) -> str:
        return f"Endpoints({list(self)!r})"


class EndpointPort(NamedTuple):
    """One element of `ports`. A port without a number is left out, a missing name is ""."""

    name: str
    protocol: Protocol
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointSlice:
    """One EndpointSlice.

    `service` is the Service of the label kubernetes.io/service-name, in the namespace of the EndpointSlice.
    `trigger_time` is the annotation endpoints.kubernetes.io/last-change-trigger-time in Unix seconds, None
    if it is missing or invalid.
    """

    name: NamespacedName
    service: NamespacedName
    family: Family
    ports: tuple[EndpointPort, ...]
    endpoints: Endpoints
    trigger_time: float | None = None
