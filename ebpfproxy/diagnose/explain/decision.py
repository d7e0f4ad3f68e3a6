"""What happens to a connection to a frontend: source ranges, policy, endpoints and the verdict."""

from collections.abc import Collection
from typing import NamedTuple

from ebpfproxy.diagnose.explain.addresses import source
from ebpfproxy.diagnose.explain.lookup import Found
from ebpfproxy.diagnose.explain.origin import Origin
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import (
    ClientClass,
    Destination,
    EndpointResult,
    Path,
    Step,
    Verdict,
)
from ebpfproxy.diagnose.situation import Served, Situation
from ebpfproxy.model.address import Address, contains, family
from ebpfproxy.model.endpoint import EndpointState
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.endpoint_reasons import EndpointReason
from ebpfproxy.plan.endpoints import API_SERVER, EndpointAddress
from ebpfproxy.plan.host_ports import is_host_port
from ebpfproxy.plan.reason import AnyReason
from ebpfproxy.plan.service_plan import (
    FrontendKind,
    FrontendPlan,
    NoEndpointAction,
    PlannedEndpoint,
    PolicyResult,
    Scope,
    ServicePortPlan,
)


class Case(NamedTuple):
    """A connection to a frontend. `client`: the class that the plan has a result for."""

    situation: Situation
    origin: Origin
    destination: Destination
    found: Found
    client: ClientClass
    path: Path


class Decision(NamedTuple):
    """`ranges` and `policy_reason` are the reasons of these steps. `served` may be another frontend than the
    one that was found. `forwarding`: a step about untranslated packets, None if the mode translates and
    nothing else is requested."""

    served: Served
    verdict: Verdict
    why: Reason
    ranges: Reason
    policy: PolicyResult
    policy_reason: Reason
    endpoints: tuple[EndpointResult, ...]
    forwarding: Step | None = None

    @property
    def has_endpoints(self) -> bool:
        return any(each.used for each in self.endpoints)

    def weighted(self) -> list[tuple[EndpointResult, int]]:
        """The endpoints that this client may use, with their weights."""
        plan = self.served.plan
        pairs = zip(plan.endpoints, plan.balancing.weights, strict=False)  # without weights if all are 1
        weights = {each[:2]: weight for each, weight in pairs}
        return [(each, weights.get((each.address, each.port), 1)) for each in self.endpoints if each.used]

    @property
    def excludes_client(self) -> bool:
        """Whether source ranges exclude the client."""
        return self.ranges in (Reason.NOT_IN_RANGES, Reason.RANGES_UNKNOWN_CLIENT)


def decide(case: Case, served: Served, client: ClientClass) -> Decision:
    """Return the decision by the rules that all modes share, for a client of this class."""
    plan, frontend = served
    policy: PolicyResult = getattr(frontend, client.value)
    ranges = _ranges(frontend, case.origin)
    endpoints = endpoint_results(case, served, policy)
    decision = Decision(
        served,
        Verdict.CONNECTS,
        Reason.CONNECTS,
        ranges,
        policy,
        _policy_reason(frontend, policy, client),
        endpoints,
    )
    if decision.excludes_client:
        return decision._replace(verdict=Verdict.DROPPED, why=Reason.DROPPED_BY_RANGES)
    if decision.has_endpoints:
        return decision
    if plan.no_endpoint_action is NoEndpointAction.DROP:
        return decision._replace(verdict=Verdict.DROPPED, why=Reason.DROPPED_BY_POLICY)
    return decision._replace(verdict=Verdict.REJECTED, why=Reason.REJECTED_NO_ENDPOINTS)


def _ranges(frontend: FrontendPlan, origin: Origin) -> Reason:
    if not frontend.restricted:
        return Reason.UNRESTRICTED
    if origin.kind is ClientClass.NODE:
        return Reason.NODE_IN_RANGES if frontend.node_admitted else Reason.NOT_IN_RANGES
    address = origin.address(family(frontend.frontend.address))
    if address is None:
        return Reason.RANGES_UNKNOWN_CLIENT
    is_admitted = any(contains(net, address) for net in frontend.source_ranges)
    return Reason.IN_RANGES if is_admitted else Reason.NOT_IN_RANGES


def _policy_reason(frontend: FrontendPlan, policy: PolicyResult, client: ClientClass) -> Reason:
    is_local = policy.scope is Scope.LOCAL
    if frontend.kind is FrontendKind.CLUSTER_IP:
        return Reason.INTERNAL_LOCAL if is_local else Reason.INTERNAL_CLUSTER
    if is_local:
        return Reason.EXTERNAL_LOCAL
    if frontend.outside.scope is Scope.LOCAL and client is not ClientClass.OUTSIDE:
        return Reason.EXTERNAL_LOCAL_INSIDE
    return Reason.EXTERNAL_CLUSTER


def endpoint_results(case: Case, served: Served, policy: PolicyResult) -> tuple[EndpointResult, ...]:
    """Return every endpoint of the Service, used or excluded, sorted by address and port.

    The plan decides which ones are used, and has recorded the reasons. It has none for host ports and if it
    was read from the kernel.
    """
    plan, situation = served.plan, case.situation
    planned = {(each.address, each.port): each for each in plan.endpoints}
    used = {(each.address, each.port) for each in plan.usable(policy.scope)}
    results = []
    if situation.is_from_tables or is_host_port(plan.name):
        why = Reason.LISTED if situation.is_from_tables else EndpointReason.POD_OF_HOST_PORT
        for target, each in planned.items():
            node = situation.context.node_name if each.on_node else ""
            is_used = target in used
            results.append(EndpointResult(*target, why if is_used else Reason.NOT_LISTED, is_used, node=node))
    else:
        states, reasons = situation.trace_of(plan)
        for target, state in sorted(states.items()):
            reason = reasons[policy.scope][target]
            results.append(_result(*target, reason, state, target in used))
        results += _without_port(plan, states.keys(), case)
    return tuple(
        _with_source(each, case, served, policy, planned[each.address, each.port]) if each.used else each
        for each in results
    )


def _with_source(
    found: EndpointResult, case: Case, served: Served, policy: PolicyResult, endpoint: PlannedEndpoint
) -> EndpointResult:
    arguments = (case.origin, case.destination, served.frontend, policy, case.path, endpoint)
    how = source(case.situation, *arguments)
    return found._replace(masqueraded=how.masqueraded, why_masquerade=how.why, seen=how.seen)


def _result(address: Address, port: int, why: AnyReason, state: EndpointState, used: bool) -> EndpointResult:
    return EndpointResult(address, port, why, used, node=state.node, zones=tuple(sorted(state.zones)))


def _without_port(
    plan: ServicePortPlan, known: Collection[EndpointAddress], case: Case
) -> list[EndpointResult]:
    """Return the endpoints whose EndpointSlices lack the port, or have addresses of the other family."""
    found: dict[Address, EndpointResult] = {}
    with_port = {address for address, _ in known}
    for piece in case.situation.state.slices_of(NamespacedName(plan.name.namespace, plan.name.name)):
        why = Reason.PORT_MISSING if piece.family is plan.family else Reason.OTHER_FAMILY
        for address, state in piece.endpoints.states_by_address():
            if address not in with_port:
                found.setdefault(address, _result(address, 0, why, state, False))
    return [found[address] for address in sorted(found)]


def keeps_last(plan: ServicePortPlan) -> bool:
    """Whether a running agent keeps the last endpoints of this Service if the API server lists none."""
    return NamespacedName(plan.name.namespace, plan.name.name) == API_SERVER
