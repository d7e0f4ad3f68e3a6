"""The explanation of one connection: all steps in their order."""

from collections.abc import Iterator

from ebpfproxy.backends.ipvs.entries import DEFAULT_SCHEDULER
from ebpfproxy.backends.ipvs.service_entries import scheduler
from ebpfproxy.backends.selection import MODES
from ebpfproxy.diagnose.explain import mode_rules
from ebpfproxy.diagnose.explain.decision import Case, Decision, decide, keeps_last
from ebpfproxy.diagnose.explain.echo import explain_echo
from ebpfproxy.diagnose.explain.hashes import hash_lines
from ebpfproxy.diagnose.explain.lookup import IPVS, USERSPACE, Found, Missing, find, is_ebpf
from ebpfproxy.diagnose.explain.origin import Classified, Origin, classify, is_by_namespace, namespace_class
from ebpfproxy.diagnose.explain.path import path
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import (
    Destination,
    EndpointResult,
    Explanation,
    Path,
    Step,
    Verdict,
    Via,
)
from ebpfproxy.diagnose.situation import Served, Situation
from ebpfproxy.model.address import Family, Protocol, family, format_address, unspecified
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.balancing import Support, unsupported
from ebpfproxy.plan.direct_return import support_on_node
from ebpfproxy.plan.open_connections import requested_resets
from ebpfproxy.plan.service_plan import Frontend, FrontendKind, NoEndpointAction

_MISSING_VERDICTS = {
    Reason.UNUSED_PORT_REJECTED: (Verdict.REJECTED, Reason.REJECTED_UNUSED_PORT),
    Reason.UNALLOCATED_CLUSTER_IP: (Verdict.DROPPED, Reason.DROPPED_UNALLOCATED),
    Reason.UNUSED_PORT_ON_NODE: (Verdict.REJECTED, Reason.REJECTED_UNUSED_PORT),
    Reason.HEALTH_CHECK_NODE_PORT: (Verdict.ANSWERED, Reason.HEALTH_CHECK_ANSWERED),
    Reason.LOOPBACK_EXCLUDED: (Verdict.REACHES_NODE, Reason.REACHES_NODE),
    Reason.OTHER_LOOPBACK: (Verdict.ROUTED, Reason.ROUTED),
}

_EXCLUDED = (Reason.LOOPBACK_EXCLUDED, Reason.ADDRESS_EXCLUDED)


def explain(situation: Situation, origin: Origin, destination: Destination) -> Explanation:
    """Return what happens to a new connection of this client, and why. Pure."""
    if destination.is_echo:
        return explain_echo(situation, origin, destination)
    client = classify(origin, situation, family(destination.address))
    found = find(situation, destination, origin)
    if isinstance(found, Missing):
        return _unserved(situation, origin, destination, client, found)
    way = path(situation, origin, destination, found.served.frontend)
    case = Case(situation, origin, destination, found, client.client, way)
    decision = mode_rules.apply(case, decide(case, found.served, client.client))
    return Explanation(
        destination,
        str(decision.served.plan.name),
        decision.verdict,
        decision.why,
        tuple(_steps(case, client, decision)),
        decision.endpoints,
        served=decision.served,
        path=way,
    )


# --- Without a frontend ---


def _unserved(
    situation: Situation, origin: Origin, destination: Destination, client: Classified, missing: Missing
) -> Explanation:
    verdict, why = _verdict_without_frontend(situation, destination, missing)
    way = path(situation, origin, destination)
    steps = [
        _client_step(situation, origin, client),
        _path_step(way),
        *_protocol_steps(situation, destination),
        Step(missing.why, _describe_missing(missing), tuple(map(describe_served, missing.nearest))),
        Step(why, why.meaning),
    ]
    return Explanation(destination, "", verdict, why, tuple(steps))


def _protocol_steps(situation: Situation, destination: Destination) -> Iterator[Step]:
    """Yield the ServicePorts that claim the frontend, if the mode cannot serve its protocol."""
    lack, to = situation.context.sctp_unserved, destination.address
    if not lack or destination.protocol is not Protocol.SCTP:
        return
    addresses = [to, unspecified(family(to))] if situation.accepts_node_ports(to) else [to]
    for address in addresses:
        for name in situation.claims_of(Frontend(address, destination.port, Protocol.SCTP)):
            yield Step(Reason.SCTP_UNSERVED, f"{name}: {Reason.SCTP_UNSERVED.meaning}: {lack}")


def _verdict_without_frontend(
    situation: Situation, destination: Destination, missing: Missing
) -> tuple[Verdict, Reason]:
    if situation.behavior.rejects_node_ports_everywhere and missing.why in _EXCLUDED:
        (node_port,) = missing.nearest
        if not node_port.plan.usable(node_port.frontend.outside.scope):
            return _without_endpoints(node_port)
    if missing.why is Reason.UNALLOCATED_CLUSTER_IP and is_ebpf(situation):
        return Verdict.REJECTED, Reason.REJECTED_UNALLOCATED
    if missing.why in _MISSING_VERDICTS:
        return _MISSING_VERDICTS[missing.why]
    if situation.is_local(destination.address):
        return Verdict.REACHES_NODE, Reason.REACHES_NODE
    return Verdict.ROUTED, Reason.ROUTED


def _without_endpoints(node_port: Served) -> tuple[Verdict, Reason]:
    """The rule for a NodePort without endpoints matches all addresses of the node, as in kube-proxy."""
    if node_port.plan.no_endpoint_action is NoEndpointAction.DROP:
        return Verdict.DROPPED, Reason.NODE_PORT_DROPPED
    return Verdict.REJECTED, Reason.NODE_PORT_REJECTED


def _describe_missing(missing: Missing) -> str:
    text = missing.why.meaning
    if missing.service:
        text += f" ({missing.service})"
    return text


# --- Steps ---


def _steps(case: Case, client: Classified, decision: Decision) -> Iterator[Step]:
    frontend = decision.served.frontend
    yield _client_step(case.situation, case.origin, client)
    yield _path_step(case.path)
    yield from _frontend_steps(case, decision)
    ranges = tuple(map(str, frontend.source_ranges)) if frontend.restricted else ()
    yield Step(decision.ranges, decision.ranges.meaning, ranges)
    yield Step(decision.policy_reason, decision.policy_reason.meaning)
    yield _endpoints_step(decision)
    if decision.verdict is Verdict.CONNECTS:
        yield from _selection_steps(case, decision)
        if decision.forwarding:
            yield decision.forwarding
        yield from _reset_steps(case, decision)
        yield from _source_steps(decision.endpoints)
        peer = f"{Reason.PEER_IS_FRONTEND.meaning}: {case.destination}"
        yield Step(Reason.PEER_IS_FRONTEND, peer)
    if keeps_last(decision.served.plan) and not decision.has_endpoints:
        yield Step(Reason.LAST_ENDPOINTS_KEPT, Reason.LAST_ENDPOINTS_KEPT.meaning)
    yield Step(decision.why, decision.why.meaning)


def _client_step(situation: Situation, origin: Origin, client: Classified) -> Step:
    namespace = namespace_class(origin, situation) if is_ebpf(situation) else None
    details = (f"network namespace: {namespace[0].value}: {namespace[1]}",) if namespace else ()
    return Step(client.why, f"{origin}: {client.why.meaning}", details)


def _path_step(way: Path) -> Step:
    details = (way.exception.meaning,) if way.exception else ()
    return Step(way.why, f"{way.place}: {way.why.meaning}", details)


def _frontend_steps(case: Case, decision: Decision) -> Iterator[Step]:
    found: Found = case.found
    yield Step(found.why, f"{describe_served(found.served)}: {found.why.meaning}")
    claims = case.situation.claims_of(found.served.frontend.frontend)
    losers = [str(name) for name in claims if name != found.plan.name]
    if losers:
        yield Step(Reason.WON_CLAIM, Reason.WON_CLAIM.meaning, tuple(f"rejected: {name}" for name in losers))
    if decision.served is not found.served:
        text = f"{describe_served(decision.served)}: {Reason.NODE_PORT_INSTEAD.meaning}"
        yield Step(Reason.NODE_PORT_INSTEAD, text)


def _endpoints_step(decision: Decision) -> Step:
    used = sum(each.used for each in decision.endpoints)
    text = f"{used} of {len(decision.endpoints)} usable"
    if used:
        why = next(each.reason for each in decision.endpoints if each.used)
    elif decision.served.plan.no_endpoint_action is NoEndpointAction.DROP:
        why = Reason.NONE_BY_POLICY
    else:
        why = Reason.NO_ENDPOINTS
    if not used:
        text += f": {why.meaning}"
    return Step(why, text, tuple(_endpoint_lines(decision.endpoints)))


def _endpoint_lines(endpoints: tuple[EndpointResult, ...]) -> Iterator[str]:
    for each in endpoints:
        place = f" on {each.node}" if each.node else ""
        zones = f", hint {', '.join(each.zones)}" if each.zones else ""
        yield f"{each}{place}: {each.reason.meaning}{zones}"


def _selection_steps(case: Case, decision: Decision) -> Iterator[Step]:
    timeout = decision.served.plan.affinity_timeout
    if not timeout:
        yield Step(Reason.NO_AFFINITY, Reason.NO_AFFINITY.meaning)
    else:
        by_namespace = case.path.via is Via.SOCKET and is_by_namespace(
            case.origin, case.situation, family(case.destination.address)
        )
        why = Reason.AFFINITY_BY_NETNS if by_namespace else Reason.AFFINITY_BY_ADDRESS
        yield Step(why, f"{why.meaning}, for {timeout} s after its last connection")
    if sum(each.used for each in decision.endpoints) == 1:
        yield Step(Reason.SINGLE, Reason.SINGLE.meaning)
    elif case.situation.mode == IPVS:
        default = case.situation.scheduler or DEFAULT_SCHEDULER
        name, _ = scheduler(decision.served.plan.balancing, default, lambda _name: True)
        yield Step(Reason.SCHEDULER, f"{Reason.SCHEDULER.meaning}: {name}")
    else:
        yield from _algorithm_steps(case, decision)


def _algorithm_steps(case: Case, decision: Decision) -> Iterator[Step]:
    """Yield the algorithm with the weights that this mode honors, and what it does not honor."""
    balancing = decision.served.plan.balancing
    of_mode = _balancing(case)
    support = support_on_node(of_mode, case.situation.context)
    weights = tuple(_weight_lines(decision)) if support.weights else ()
    if balancing.algorithm not in (None, Algorithm.RANDOM) and balancing.algorithm in support.algorithms:
        text = f"{Reason.ALGORITHM.meaning}: {balancing.algorithm.value}"
        yield Step(Reason.ALGORITHM, text, (*weights, *hash_lines(case, decision)))
    elif case.path.via is Via.RELAY and balancing.algorithm is not Algorithm.RANDOM:
        yield Step(Reason.RELAY_SELECTS, Reason.RELAY_SELECTS.meaning, weights)
    else:
        why = Reason.RANDOM_BY_WEIGHT if weights else Reason.RANDOM
        yield Step(why, why.meaning, weights)
    ignored = ", ".join(unsupported(balancing, support, requested_resets(decision.served.plan)))
    if ignored:
        yield Step(Reason.BALANCING_IGNORED, f"{Reason.BALANCING_IGNORED.meaning}: {ignored}")


def _balancing(case: Case) -> Support:
    """Return what the mode honors; at loopback in mode nftables, what a relay does."""
    name = USERSPACE if case.path.via is Via.RELAY else case.situation.mode
    return next(mode.balancing for mode in MODES if mode.name == name)


def _reset_steps(case: Case, decision: Decision) -> Iterator[Step]:
    """Yield when the connection may be reset."""
    of_mode = _balancing(case)
    plan = decision.served.plan
    if of_mode.resets and plan.serving is not None:
        yield Step(Reason.RESET_IF_REMOVED, Reason.RESET_IF_REMOVED.meaning)
    if of_mode.resets and plan.rebalancing:
        text = f"{Reason.RESET_IF_ADDED.meaning}: {plan.rebalancing.percent} % of them per minute"
        yield Step(Reason.RESET_IF_ADDED, text)


def _weight_lines(decision: Decision) -> Iterator[str]:
    """Yield the weights of the endpoints that this client may use; nothing if all of them are equal."""
    weighted = decision.weighted()
    if len({weight for _, weight in weighted}) > 1:
        yield from (f"{each}: weight {weight}" for each, weight in weighted)


def _source_steps(endpoints: tuple[EndpointResult, ...]) -> Iterator[Step]:
    """Yield a step for each reason of masquerading, and how its endpoints see the client."""
    by_reason: dict[Reason, list[EndpointResult]] = {}
    for each in endpoints:
        if each.used and each.why_masquerade:
            by_reason.setdefault(each.why_masquerade, []).append(each)
    for why, of in by_reason.items():
        is_for_all = len(by_reason) == 1
        yield Step(why, why.meaning, () if is_for_all else tuple(map(str, of)))
        seen = dict.fromkeys(address for each in of for address in each.seen)
        sees = Reason.SEES_NODE if of[0].masqueraded else Reason.SEES_CLIENT
        shown = " or ".join(map(format_address, seen)) or "unknown without a known client or device"
        yield Step(sees, f"{sees.meaning}: {shown}")


def describe_served(served: Served) -> str:
    """Return for example "default/web:http ClusterIP 10.96.0.10:80/TCP"."""
    frontend = served.frontend
    if frontend.kind is FrontendKind.NODE_PORT:
        suffix = "" if served.plan.family is Family.IPV4 else " (IPv6)"
        return (
            f"{served.plan.name} NodePort {frontend.frontend.port}/{frontend.frontend.protocol.name}{suffix}"
        )
    return f"{served.plan.name} {frontend.kind.value} {frontend.frontend}"
