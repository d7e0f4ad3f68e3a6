"""Plans as text: `plan_text` has the plans themselves, `flows_text` the result for each new connection."""

from collections.abc import Iterator

from ebpfproxy.model.address import format_address, format_endpoint, format_network
from ebpfproxy.plan.balancing import DEFAULT, PlannedBalancing
from ebpfproxy.plan.counts import no_local_endpoints
from ebpfproxy.plan.health_check_node_port import local_endpoints, needs_health_check
from ebpfproxy.plan.service_plan import (
    DevicePlan,
    Frontend,
    FrontendPlan,
    NoEndpointAction,
    PlannedEndpoint,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.golden.situation import Situation

_SOURCES = ("pod", "node", "outside")


def plan_text(situation: Situation) -> str:
    """A block for each ServicePort, for the node, for lost claims, and for rejected objects and fields."""
    blocks = ["\n".join(_port_block(plan)) for plan in situation.plans]
    blocks.append("\n".join(_node_block(situation)))
    if situation.lost:
        lost = [f"  {_frontend(c.frontend)}: {c.loser} loses to {c.winner}" for c in situation.lost]
        blocks.append("\n".join(["lost claims", *lost]))
    if situation.rejected:
        blocks.append("\n".join(["rejected", *(f"  {line}" for line in situation.rejected)]))
    return "\n\n".join(blocks) + "\n"


def flows_text(situation: Situation) -> str:
    """A line for each frontend and class of clients: the endpoints that a new connection may use."""
    rows = [row for plan in situation.plans for row in _flows(plan)]
    if not rows:
        return "no frontends\n"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def _port_block(plan: ServicePortPlan) -> Iterator[str]:
    yield f"{plan.name} {plan.name.protocol.name} {plan.family.value}"
    for each in plan.frontends:
        yield f"  {each.kind.value} {_frontend(each.frontend)}"
        for source in _SOURCES:
            policy_result: PolicyResult = getattr(each, source)
            yield f"    {source:<8} {policy_result.scope.value}{', masquerade' * policy_result.masquerade}"
        if each.restricted:
            node = "admitted" if each.node_admitted else "not admitted"
            yield f"    only from {_ranges(each)}; the node is {node}"
    for endpoint in plan.endpoints:
        yield f"  endpoint {_endpoint(endpoint)} {_use(endpoint)}{', on this node' * bool(endpoint.on_node)}"
    yield f"  no-endpoint action: {plan.no_endpoint_action.value}"
    if plan.affinity_timeout:
        yield f"  session affinity for {plan.affinity_timeout} s"
    if plan.balancing != DEFAULT:
        yield f"  selection: {', '.join(_selection(plan.balancing))}"


def _selection(balancing: PlannedBalancing) -> Iterator[str]:
    yield balancing.algorithm.value if balancing.algorithm else "default of the mode"
    if balancing.weights:
        yield f"weights {' '.join(map(str, balancing.weights))}"
    if balancing.slow_start:
        yield f"slow start {balancing.slow_start} s"
    if balancing.forwarding:
        yield f"forwarding {balancing.forwarding.value}"


def _node_block(situation: Situation) -> Iterator[str]:
    yield "node"
    if situation.state.node is None:
        yield "  Node object unknown"
    nets = sorted(situation.node_plan.node_port_networks)
    yield f"  NodePort addresses: {', '.join(map(format_network, nets)) or 'none'}"
    yield from map(_device, situation.node_plan.devices)
    none_here = no_local_endpoints(situation.plans)
    if any(none_here):
        yield f"  without local endpoints: {none_here.internal} internal, {none_here.external} external"
    for name, service in sorted(situation.state.services.items()):
        if needs_health_check(service):
            slices = situation.state.slices_of(name)
            count = local_endpoints(service, slices, situation.context.node_name)
            yield f"  health check {service.health_check_node_port} of {name}: {count} local"


def _device(plan: DevicePlan) -> str:
    own = [format_address(address) for address in (plan.v4, plan.v6) if address]
    layer3 = ", no Ethernet header" * plan.layer3
    return (
        f"  programs on {plan.name}: {plan.role.value}{layer3}, masquerade with {' '.join(own) or 'nothing'}"
    )


def _flows(plan: ServicePortPlan) -> Iterator[tuple[str, str, str, str, str]]:
    for each in plan.frontends:
        for source in _SOURCES:
            result = _result(plan, getattr(each, source))
            excluded = source == "node" and each.restricted and not each.node_admitted
            yield (
                f"{each.kind.value} {_frontend(each.frontend)}",
                source,
                "->",
                "drop" if excluded else result,
                f"from {_ranges(each)}, else drop" if each.restricted and source != "node" else "",
            )


def _result(plan: ServicePortPlan, policy_result: PolicyResult) -> str:
    local = policy_result.scope is Scope.LOCAL
    usable = [_endpoint(each) for each in plan.endpoints if (each.local if local else each.cluster)]
    if not usable:
        return "reject" if plan.no_endpoint_action is NoEndpointAction.REJECT else "drop"
    return " ".join(usable) + (" masqueraded" if policy_result.masquerade else "")


def _use(endpoint: PlannedEndpoint) -> str:
    scopes = ["cluster"] * endpoint.cluster + ["local"] * endpoint.local
    return " and ".join(scopes) or "no new connections"


def _endpoint(endpoint: PlannedEndpoint) -> str:
    return format_endpoint(endpoint.address, endpoint.port)


def _ranges(each: FrontendPlan) -> str:
    return ", ".join(map(format_network, each.source_ranges))


def _frontend(frontend: Frontend) -> str:
    return f"{format_endpoint(frontend.address, frontend.port)}/{frontend.protocol.name}"
