"""What is dialed in a cluster's state, and what comes of it by the reference, whatever the backend."""

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
from tests.support.reference import Claim, Client, FrontendAddress, Outcome, Question, Reached, Target

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
    """What one class of clients dials. `claim`: who has it, None for nobody; then `neighbors`: the kinds of
    frontends that the address has on other ports. `node_port`: who would have it otherwise.
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
        """Of the frontend; "" where there is none."""
        return self.claim.kind if self.claim else ""

    @property
    def restricted(self) -> bool:
        """Whether source ranges count."""
        return self.claim is not None and self._outcome(self.source).restricted

    @property
    def is_kept_out(self) -> bool:
        """Whether they keep this client out."""
        return self.restricted and not reference.admitted(self.question, self.client)

    @property
    def is_without_endpoints(self) -> bool:
        """Whether somebody has it, and no endpoint anywhere."""
        return self.claim is not None and self._outcome(self.source).verdict == "reject"

    @property
    def is_dropped_outside(self) -> bool:
        """Whether policy Local leaves nothing to clients outside."""
        return self.claim is not None and self._outcome("outside").verdict == "drop"

    @property
    def is_before_node_port(self) -> bool:
        """Whether somebody has this very address and number, and a NodePort would have it, too."""
        return self.kind not in ("", "NodePort") and self.node_port is not None

    @property
    def outside_targets(self) -> frozenset[Target]:
        """The endpoints that clients outside may get, but for source ranges."""
        return (self.claim and self._outcome("outside").targets) or frozenset()

    @property
    def is_masqueraded(self) -> bool:
        """Whoever the endpoint is."""
        return self.claim is not None and self._outcome(self.source).masquerade

    @property
    def local_targets(self) -> frozenset[Target]:
        """The endpoints that say that they are on the first node."""
        found = reference.endpoints(self.claim.question) if self.claim else {}
        return frozenset(target for target, endpoint in found.items() if endpoint.node == HERE)

    @property
    def unsaid_targets(self) -> frozenset[Target]:
        """Those that are, but do not say so."""
        found = reference.endpoints(self.claim.question) if self.claim else {}
        here = frozenset(target for target in found if BY_ADDRESS[target[0]].node == HERE)
        return here - self.local_targets

    @property
    def question(self) -> Question:
        """Of who has it."""
        assert self.claim
        return self.claim.question

    def _outcome(self, source: str) -> Outcome:
        return reference.outcome(self.question, self.kind, source)

    def __str__(self) -> str:
        kind = self.kind or "nobody's"
        return f"{self.source}: {kind} {format_address(self.address)} {self.port}/{self.protocol.name}"


class World:
    """A state, who has what in it, and what is worth to be dialed: also what somebody had before."""

    def __init__(self, state: ClusterState, previous: "World | None" = None) -> None:
        self.state = state
        self.granted: Mapping[FrontendAddress, Claim] = reference.granted(state, CONTEXT)
        self._kinds: dict[Address, set[str]] = {}
        for (address, _, _), granted in self.granted.items():
            self._kinds.setdefault(address, set()).add(granted.kind)
        places = self.granted.keys() | (previous.granted.keys() if previous else set())
        self.cases = [case for place in sorted(places) for case in self._cases(place)]

    def case(self, source: str, protocol: Protocol, address: Address, port: int) -> Case:
        """An address of its own goes before NodePorts, which are on all addresses of the node."""
        own = self.granted.get((address, port, protocol))
        node_port = None
        if address in _OWN:
            node_port = self.granted.get((unspecified(family(address)), port, protocol))
        claim = own or node_port
        neighbors = frozenset(() if claim else self._kinds.get(address, ()))
        return Case(source, protocol, address, port, claim, neighbors, node_port)

    def again(self, case: Case) -> Case:
        """The same as it is in this state."""
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
    """What nobody serves is refused by the machine that has the address; else the network leads nowhere."""
    if case.claim:
        return reference.reached(case.claim, case.client)
    return Reached({}, "reject" if case.is_own or case.address in _OTHERS else "drop")


def outcomes(case: Case, reached: Reached) -> frozenset[str]:
    """What a client may be told."""
    return _VERDICTS[reached.verdict] | {
        f"{name_of(target)} {format_address(seen)}"
        for target, masqueraded in reached.targets.items()
        for seen in _seen(case, BY_ADDRESS[target[0]], masqueraded)
    }


def name_of(target: Target) -> str:
    """As its server calls itself."""
    return f"{BY_ADDRESS[target[0]].name}:{target[1]}"


def _seen(case: Case, server: Server, masqueraded: bool | None) -> Iterator[Address]:
    """The client's address as the server sees it.

    The node is seen at the address by which it leads there. What is delivered to the node itself leaves by no
    device, so it is never masqueraded; its own may come from any of its addresses.
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
    """What a UDP socket may meet that was with the server `who` before, and whether it may take a while.

    `reached` is what a new one would meet now. A flow stays with an endpoint that serves, whoever gets that
    now, and leaves one that is gone. None where neither is promised: where the frontend is gone, or is
    another's, while the endpoint is there for that Service still.
    """
    assert before.claim
    now = world.again(before).claim
    wanted = frozenset(map(name_of, reached.targets))
    fresh = wanted | _VERDICTS[reached.verdict]
    sure, perhaps = _keepers(world, before.claim, before.of)
    if now and now.name == before.claim.name:
        if who in (sure & wanted if reached.ends_flows else sure):
            return frozenset({who}), False
        return fresh | {BROKEN} | ({who} & perhaps), True
    if who in perhaps:
        return None
    heirs = _keepers(world, now, before.of)[1] if now else frozenset()
    return fresh | {BROKEN} | ({who} & heirs), True


def _keepers(world: World, claim: Claim, of: Family) -> tuple[frozenset[str], frozenset[str]]:
    """By their names, those that keep flows of this port of a Service, and those that may."""
    for each in world.granted.values():
        if each.name == claim.name and each.question.of is of:
            sure, perhaps = reference.keeps_flows(each.question)
            return frozenset(map(name_of, sure)), frozenset(map(name_of, perhaps))
    return frozenset(), frozenset()
