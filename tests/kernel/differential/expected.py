"""The frontends that are dialed in a cluster's state, and the outcomes by the reference, for all backends."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import (
    Address,
    Family,
    Protocol,
    family,
    format_address,
    is_unspecified,
    parse_address,
    unspecified,
)
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.plan.service_plan import PlanContext
from tests.kernel.clients import REFUSED, SILENT
from tests.kernel.differential.dialers import BROKEN
from tests.kernel.differential.places import (
    BY_ADDRESS,
    CLIENTS,
    GATEWAY,
    HERE,
    LOOPBACK,
    NODE,
    OTHER_NODE,
    Server,
    of_family,
)
from tests.support import reference
from tests.support.reference import (
    Claim,
    Client,
    FlowsEnd,
    FrontendAddress,
    Outcome,
    Question,
    Reached,
    Target,
)

CONTEXT = PlanContext(node_name=HERE)

_OWN = frozenset(parse_address(text) for pair in (NODE, GATEWAY, LOOPBACK) for text in pair)
_OTHERS = frozenset(parse_address(text) for text in OTHER_NODE)
_VERDICTS = {
    "": frozenset[str](),
    "reject": frozenset({REFUSED}),
    "drop": frozenset({SILENT}),
    "either": frozenset({REFUSED, SILENT}),
}


class Case(NamedTuple):
    """An address and port that one class of clients dials. `claim`: the Service port that has it, or None;
    then `neighbors` are the kinds of frontends that the address has on other ports. `node_port`: the NodePort
    that would have it without `claim`.
    """

    source: str
    protocol: Protocol
    address: Address
    port: int
    claim: Claim | None
    neighbors: frozenset[str] = frozenset()
    node_port: Claim | None = None

    @property
    def of(self) -> Family:
        return family(self.address)

    @property
    def client(self) -> Client:
        return Client(self.source, of_family(CLIENTS[self.source], self.of))

    @property
    def is_own(self) -> bool:
        """Whether the address is the first node's."""
        return self.address in _OWN

    @property
    def is_loopback(self) -> bool:
        return self.address == of_family(LOOPBACK, self.of)

    @property
    def kind(self) -> str:
        """The kind of the frontend; "" if there is none."""
        return self.claim.kind if self.claim else ""

    @property
    def restricted(self) -> bool:
        """Whether source ranges apply."""
        return self.claim is not None and self._outcome(self.source).restricted

    @property
    def is_kept_out(self) -> bool:
        """Whether source ranges exclude this client."""
        return self.restricted and not reference.admitted(self.question, self.client)

    @property
    def is_without_endpoints(self) -> bool:
        """Whether a Service port has it, but no endpoints."""
        return self.claim is not None and self._outcome(self.source).verdict == "reject"

    @property
    def is_dropped_outside(self) -> bool:
        """Whether policy Local drops packets of external clients."""
        return self.claim is not None and self._outcome("outside").verdict == "drop"

    @property
    def is_before_node_port(self) -> bool:
        """Whether a frontend has exactly this address and port, and a NodePort has the port, too."""
        return self.kind not in ("", "NodePort") and self.node_port is not None

    @property
    def outside_targets(self) -> frozenset[Target]:
        """The endpoints that external clients may get, apart from source ranges."""
        return (self.claim and self._outcome("outside").targets) or frozenset()

    @property
    def is_masqueraded(self) -> bool:
        """Whether the client is masqueraded for all endpoints."""
        return self.claim is not None and self._outcome(self.source).masquerade

    @property
    def local_targets(self) -> frozenset[Target]:
        """The endpoints with the first node's name."""
        found = reference.endpoints(self.claim.question) if self.claim else {}
        return frozenset(target for target, endpoint in found.items() if endpoint.node == HERE)

    @property
    def unnamed_targets(self) -> frozenset[Target]:
        """The endpoints that are on the first node, but without its name."""
        found = reference.endpoints(self.claim.question) if self.claim else {}
        here = frozenset(target for target in found if BY_ADDRESS[target[0]].node == HERE)
        return here - self.local_targets

    @property
    def question(self) -> Question:
        """The question to the reference about the Service port that has it."""
        assert self.claim
        return self.claim.question

    def _outcome(self, source: str) -> Outcome:
        return reference.outcome(self.question, self.kind, source)

    def __str__(self) -> str:
        kind = self.kind or "unused"
        return f"{self.source}: {kind} {format_address(self.address)} {self.port}/{self.protocol.name}"


class World:
    """A state, its frontends, and the cases to dial. These include frontends of the previous state."""

    def __init__(self, state: ClusterState, previous: "World | None" = None) -> None:
        self.state = state
        self.granted: Mapping[FrontendAddress, Claim] = reference.granted(state, CONTEXT)
        self._kinds: dict[Address, set[str]] = {}
        for (address, _, _), granted in self.granted.items():
            self._kinds.setdefault(address, set()).add(granted.kind)
        places = self.granted.keys() | (previous.granted.keys() if previous else set())
        self.cases = [case for place in sorted(places) for case in self._cases(place)]

    def case(self, source: str, protocol: Protocol, address: Address, port: int) -> Case:
        """A frontend with exactly this address precedes NodePorts, which are on all addresses of the node."""
        own = self.granted.get((address, port, protocol))
        node_port = None
        if address in _OWN:
            node_port = self.granted.get((unspecified(family(address)), port, protocol))
        claim = own or node_port
        neighbors = frozenset(() if claim else self._kinds.get(address, ()))
        return Case(source, protocol, address, port, claim, neighbors, node_port)

    def again(self, case: Case) -> Case:
        """The same case in this state."""
        return self.case(case.source, case.protocol, case.address, case.port)

    def _cases(self, place: FrontendAddress) -> Iterator[Case]:
        address, port, protocol = place
        for source in reference.SOURCES:
            if not is_unspecified(address):
                yield self.case(source, protocol, address, port)
                continue
            own = [NODE, {"pod": GATEWAY, "node": LOOPBACK, "outside": OTHER_NODE}[source]]
            for pair in own:
                yield self.case(source, protocol, of_family(pair, family(address)), port)


def by_reference(case: Case) -> Reached:
    """An address without a frontend: the host that has it rejects; otherwise the packet is lost."""
    if case.claim:
        return reference.reached(case.claim, case.client)
    return Reached({}, "reject" if case.is_own or case.address in _OTHERS else "drop")


def outcomes(case: Case, reached: Reached) -> frozenset[str]:
    """All outcomes that a client may get."""
    sender = case._replace(source="node") if reached.relayed else case
    return _VERDICTS[reached.verdict] | {
        f"{name_of(target)} {format_address(seen)}"
        for target, masqueraded in reached.targets.items()
        for seen in _seen(sender, BY_ADDRESS[target[0]], masqueraded)
    }


def name_of(target: Target) -> str:
    """The name in the server's answer."""
    return f"{BY_ADDRESS[target[0]].name}:{target[1]}"


def _seen(case: Case, server: Server, masqueraded: bool | None) -> Iterator[Address]:
    """The client's address as the server sees it.

    The node is seen with its address toward the server. Packets to the node itself leave by no device, so
    they are never masqueraded; its own packets may have any of its addresses.
    """
    if server.node == HERE and server.host:
        if case.source == "node":
            yield from (of_family(pair, case.of) for pair in (NODE, GATEWAY, LOOPBACK))
        else:
            yield case.client.address
        return
    if masqueraded is not False or case.source == "node":
        yield of_family(GATEWAY if server.node == HERE else NODE, case.of)
    if not masqueraded and case.source != "node":
        yield case.client.address


def of_kept(world: World, before: Case, who: str, reached: Reached) -> tuple[frozenset[str], bool] | None:
    """The outcomes that a UDP socket may get whose server was `who` before, and whether they may be delayed.

    `reached` is the outcome of a new socket. A flow stays with an endpoint that serves, also if new clients
    do not get it, and leaves a removed one. None if neither is promised: if the frontend is gone or has
    another Service, while the first Service still has the endpoint.
    """
    assert before.claim
    now = world.again(before).claim
    wanted = frozenset(map(name_of, reached.targets))
    fresh = wanted | _VERDICTS[reached.verdict]
    sure, perhaps = _keepers(world, before.claim, before.of)
    if now and now.name == before.claim.name:
        if who in sure and _keeps(reached, who in wanted):
            return frozenset({who}), False
        return fresh | {BROKEN} | ({who} & perhaps), True
    if who in perhaps:
        return None
    successors = _keepers(world, now, before.of)[1] if now else frozenset()
    return fresh | {BROKEN} | ({who} & successors), True


def _keeps(reached: Reached, is_wanted: bool) -> bool:
    """Whether a flow stays at an endpoint that serves. `is_wanted`: whether new flows may get it."""
    match reached.flows_end:
        case FlowsEnd.UNUSED:
            return is_wanted
        case FlowsEnd.WITHOUT_ANY:
            return bool(reached.targets)
        case _:
            return True


def _keepers(world: World, claim: Claim, of: Family) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the endpoints that keep flows of this Service port, and of those that may keep them."""
    for each in world.granted.values():
        if each.name == claim.name and each.question.of is of:
            sure, perhaps = reference.keeps_flows(each.question)
            return frozenset(map(name_of, sure)), frozenset(map(name_of, perhaps))
    return frozenset(), frozenset()
