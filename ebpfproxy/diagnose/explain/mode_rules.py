"""Where a mode does something else than the rules that all modes share.

That is its behavior (`backends/behavior.py`), and what only modes ebpf and ipvs have.
"""

from collections.abc import Collection, Iterator

from ebpfproxy.backends.behavior import NodePortInstead
from ebpfproxy.backends.ipvs.forwarding import Surroundings, choose
from ebpfproxy.diagnose.explain.decision import Case, Decision, decide, endpoint_results
from ebpfproxy.diagnose.explain.lookup import IPVS
from ebpfproxy.diagnose.explain.origin import EBPF
from ebpfproxy.diagnose.explain.path import reaches_itself
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import ClientClass, EndpointResult, Step, Verdict, Via
from ebpfproxy.model.address import Protocol, family, format_address, is_loopback
from ebpfproxy.model.balancing import Forwarding
from ebpfproxy.plan.service_plan import FrontendKind, NoEndpointAction

_FORWARDED = {Forwarding.DIRECT_ROUTING: Reason.DIRECT_ROUTING, Forwarding.TUNNEL: Reason.TUNNEL}
_EXTERNAL = (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)


def apply(case: Case, decision: Decision) -> Decision:
    """Return the decision as the mode of the case makes it."""
    of, is_excluded = case.situation.behavior, decision.excludes_client
    if of.by_relay and case.destination.protocol is Protocol.SCTP:
        return decision._replace(verdict=Verdict.REJECTED, why=Reason.SCTP_NOT_RELAYED)
    if of.relays_loopback and _is_other_node_port_at_loopback(case):
        return decision._replace(verdict=Verdict.REJECTED, why=Reason.LOOPBACK_NOT_RELAYED)
    if of.ranges_need_endpoints:
        decision = _rejected_before_ranges(decision)
    is_rejected = decision.verdict is Verdict.REJECTED
    if is_rejected and not of.rejects_external_of_node and _is_external_of_node(case, decision):
        return decision._replace(verdict=Verdict.ROUTED, why=Reason.EXTERNAL_NOT_REJECTED)
    if decision.verdict is not Verdict.CONNECTS:
        decision = _with_node_port(case, decision, is_excluded)
    if of.one_list and case.client is not ClientClass.OUTSIDE and decision.verdict is Verdict.CONNECTS:
        decision = _with_one_list(case, decision)
    if case.situation.mode == EBPF:
        return _ebpf(case, decision)
    return _ipvs(case, decision) if case.situation.mode == IPVS else decision


def _is_other_node_port_at_loopback(case: Case) -> bool:
    """Whether it is a NodePort at loopback that no relay serves."""
    is_node_port = case.found.served.frontend.kind is FrontendKind.NODE_PORT
    return is_node_port and is_loopback(case.destination.address) and case.path.via is not Via.RELAY


def _is_external_of_node(case: Case, decision: Decision) -> bool:
    """Whether the node itself connects to an external address of another host."""
    is_node = case.origin.kind is ClientClass.NODE and not case.situation.is_local(case.destination.address)
    return is_node and decision.served.frontend.kind in _EXTERNAL


def _with_node_port(case: Case, decision: Decision, is_excluded: bool) -> Decision:
    """Return the decision for the NodePort with the same number, if it answers instead.

    Without endpoints it decides between rejecting and dropping in mode nftables, where NodePorts are looked
    up first at input, and in mode iptables the one of two rules that happens to be first.
    """
    when, node_port = case.situation.behavior.node_port_instead, case.found.node_port
    if (
        when is NodePortInstead.NEVER
        or node_port is None
        or case.found.served.frontend.kind is FrontendKind.NODE_PORT
    ):
        return decision
    instead = decide(case, node_port, case.client)
    is_rejected = decision.verdict is Verdict.REJECTED
    if when is NodePortInstead.IF_NOTHING_LISTENS:
        return instead if is_rejected else decision
    if instead.has_endpoints:
        return instead if is_rejected or when is NodePortInstead.IF_UNTRANSLATED else decision
    if instead.verdict is decision.verdict or is_excluded:
        return decision
    if when is NodePortInstead.IF_REJECTED:
        return decision._replace(verdict=instead.verdict, why=instead.why)
    return decision._replace(verdict=Verdict.REJECTED_OR_DROPPED, why=Reason.REJECTED_OR_DROPPED)


def _ebpf(case: Case, decision: Decision) -> Decision:
    is_dropped = decision.verdict is Verdict.DROPPED
    passes_nothing = case.path.via is Via.NOTHING or is_dropped
    if (
        case.origin.kind is ClientClass.NODE
        and passes_nothing
        and reaches_itself(case.situation, case.destination)
    ):
        return decision._replace(verdict=Verdict.REACHES_NODE, why=Reason.REACHES_NODE)
    if case.origin.kind is ClientClass.OUTSIDE and decision.verdict is Verdict.CONNECTS:
        return _with_direct_return(case, decision)
    return decision


def _with_direct_return(case: Case, decision: Decision) -> Decision:
    """Apply direct server return to the endpoints whose nodes accept tunneled packets."""
    plan = decision.served.plan
    pairs = zip(plan.endpoints, plan.balancing.tunnels, strict=False)  # none without direct server return
    tunnels = {each[:2]: format_address(node) for each, node in pairs if node}
    tunneled = [each for each in decision.endpoints if each.used and (each.address, each.port) in tunnels]
    if not tunneled:
        return decision
    lines = tuple(f"{each}: by {tunnels[each.address, each.port]}" for each in tunneled)
    endpoints = _replying_directly(case, decision, tunneled)
    return decision._replace(
        endpoints=tuple(endpoints),
        forwarding=Step(Reason.DIRECT_RETURN, Reason.DIRECT_RETURN.meaning, lines),
    )


def _rejected_before_ranges(decision: Decision) -> Decision:
    """Return the decision of a mode in which source ranges do not apply without any endpoints."""
    if (
        decision.served.frontend.restricted
        and not decision.has_endpoints
        and decision.served.plan.no_endpoint_action is NoEndpointAction.REJECT
    ):
        return decision._replace(
            verdict=Verdict.REJECTED,
            why=Reason.REJECTED_NO_ENDPOINTS,
            ranges=Reason.RANGES_WITHOUT_ENDPOINTS,
        )
    return decision


def _ipvs(case: Case, decision: Decision) -> Decision:
    decision = _ipvs_translated(case, decision)
    return _with_forwarding(case, decision) if decision.verdict is Verdict.CONNECTS else decision


def _with_forwarding(case: Case, decision: Decision) -> Decision:
    """Apply direct routing and tunnels, where the endpoint gets the packet unchanged."""
    situation, (plan, frontend) = case.situation, decision.served
    listed = {(each.address, each.port) for each in decision.endpoints if each.used}
    used = [each for each in plan.endpoints if each[:2] in listed]
    surroundings = Surroundings(lambda _name: True, situation.is_local, situation.has_gateway)
    choice = choose(plan, frontend, used, situation.forwarding, surroundings)
    if choice.untranslated is not Forwarding.NAT and any(
        each.address in case.origin.addresses and each.on_node for each in used
    ):
        return decision._replace(endpoints=tuple(_only_itself(case, decision)))
    if choice.limit:
        why = Reason.FORWARDING_LIMITED
        return decision._replace(forwarding=Step(why, f"{why.meaning}: {choice.limit}"))
    if choice.method is Forwarding.NAT:
        return decision
    why = _FORWARDED[choice.method]
    decision = decision._replace(forwarding=Step(why, why.meaning))
    if case.origin.kind is not ClientClass.NODE:
        used_ones = [each for each in decision.endpoints if each.used]
        return decision._replace(endpoints=tuple(_replying_directly(case, decision, used_ones)))
    return _node_in_tunnel(case, decision) if choice.method is Forwarding.TUNNEL else decision


def _only_itself(case: Case, decision: Decision) -> Iterator[EndpointResult]:
    for each in decision.endpoints:
        if each.address in case.origin.addresses or not each.used:
            yield each
        else:
            yield each._replace(
                used=False, reason=Reason.HAS_ADDRESS_ITSELF, masqueraded=None, why_masquerade=None, seen=()
            )


def _replying_directly(
    case: Case, decision: Decision, which: Collection[EndpointResult]
) -> Iterator[EndpointResult]:
    own = case.origin.address(family(case.destination.address))
    for each in decision.endpoints:
        if each in which:
            seen = (own,) if own else ()
            yield each._replace(masqueraded=False, why_masquerade=Reason.KEEPS_ADDRESSES, seen=seen)
        else:
            yield each


def _node_in_tunnel(case: Case, decision: Decision) -> Decision:
    """The node's own packets have the address of the Service as their source, which the endpoint has, too."""
    endpoints = tuple(
        each._replace(works=False, reason=Reason.NODE_IN_TUNNEL)
        if each.used and not case.situation.is_local(each.address)
        else each
        for each in decision.endpoints
    )
    decision = decision._replace(endpoints=endpoints)
    if any(each.used and each.works for each in endpoints):
        return decision
    return decision._replace(verdict=Verdict.DROPPED, why=Reason.DROPPED_IN_TUNNEL)


def _ipvs_translated(case: Case, decision: Decision) -> Decision:
    """A pod that reaches itself is masqueraded only if the endpoint has the node's name."""
    client = case.origin.address(family(case.destination.address))
    if case.origin.kind is ClientClass.NODE or client is None or decision.policy.masquerade:
        return decision
    if any(
        each.address == client and each.node == case.situation.context.node_name
        for each in decision.endpoints
    ):
        return decision
    endpoints = tuple(
        each._replace(works=False, reason=Reason.HAIRPIN_LOST)
        if each.used and each.address == client
        else each
        for each in decision.endpoints
    )
    return decision._replace(endpoints=endpoints)


def _with_one_list(case: Case, decision: Decision) -> Decision:
    """Give the client the list of clients outside, if that is not empty."""
    outside = decision.policy._replace(scope=decision.served.frontend.outside.scope)
    listed = endpoint_results(case, decision.served, outside)
    if outside == decision.policy or not any(each.used for each in listed):
        return decision
    used = {(each.address, each.port) for each in decision.endpoints if each.used}
    endpoints = tuple(
        each._replace(reason=Reason.ONE_LIST_EXCLUDED)
        if not each.used and (each.address, each.port) in used
        else each
        for each in listed
    )
    return decision._replace(endpoints=endpoints, policy_reason=Reason.IPVS_ONE_LIST)
