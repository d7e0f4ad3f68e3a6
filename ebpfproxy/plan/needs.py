"""What of a plan a pod's own sockets cannot do, so that its packets have to be looked at."""

from ebpfproxy.model.address import Protocol
from ebpfproxy.plan.service_plan import FrontendPlan, NoEndpointAction, Scope, ServicePortPlan


def needs_packets_of_pods(plan: ServicePortPlan) -> bool:
    """Whether pods reach a frontend of `plan` rightly only where their devices have our programs.

    - Source ranges are about the address that a packet comes from, which a socket may not have yet.
    - SCTP sockets run no program when they connect or send; only those of TCP and UDP do.
    - A connection that shall meet silence cannot be stopped when it connects, only refused.
    """
    if plan.name.protocol is Protocol.SCTP and plan.frontends:
        return True
    return any(each.restricted or _is_dropped(plan, each) for each in plan.frontends)


def _is_dropped(plan: ServicePortPlan, frontend: FrontendPlan) -> bool:
    if plan.no_endpoint_action is not NoEndpointAction.DROP:
        return False
    local = frontend.pod.scope is Scope.LOCAL
    return not any(each.local if local else each.cluster for each in plan.endpoints)
