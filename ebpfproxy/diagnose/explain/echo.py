"""Echo requests (ping) to a frontend address. They have no port, so they reach no endpoint."""

from ebpfproxy.backends.behavior import Unused
from ebpfproxy.diagnose.explain.lookup import is_unallocated
from ebpfproxy.diagnose.explain.origin import Origin, classify
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import ClientClass, Destination, Explanation, Step, Verdict
from ebpfproxy.diagnose.situation import Served, Situation
from ebpfproxy.model.address import family
from ebpfproxy.plan.service_plan import FrontendKind, NoEndpointAction


def explain_echo(situation: Situation, origin: Origin, destination: Destination) -> Explanation:
    """Return what happens to an echo request to the address of the destination."""
    of_address = situation.addresses.get(destination.address, ())
    client = classify(origin, situation, family(destination.address))
    verdict, why = _verdict(situation, origin, destination, of_address)
    missing = Reason.ECHO_REQUEST if of_address else Reason.NO_FRONTEND
    names = tuple(sorted({str(each.plan.name) for each in of_address}))
    steps = (
        Step(client.why, f"{origin}: {client.why.meaning}"),
        Step(missing, missing.meaning, names),
        Step(why, why.meaning),
    )
    return Explanation(destination, "", verdict, why, steps)


def _verdict(
    situation: Situation, origin: Origin, destination: Destination, of_address: tuple[Served, ...]
) -> tuple[Verdict, Reason]:
    if situation.is_local(destination.address) or (situation.behavior.has_addresses and of_address):
        return Verdict.ANSWERED, Reason.ECHO_ANSWERED
    if not of_address:
        drops = situation.behavior.unused_cluster_ips is Unused.PORTS_REJECTED
        if drops and is_unallocated(situation, destination.address):
            return Verdict.DROPPED, Reason.DROPPED_UNALLOCATED
        return Verdict.ROUTED, Reason.ROUTED
    kinds = {each.frontend.kind for each in of_address}
    is_virtual = FrontendKind.CLUSTER_IP in kinds or not situation.is_foreign(destination.address)
    if situation.behavior.answers_pings:
        if not is_virtual:
            return Verdict.ROUTED, Reason.ROUTED
        is_inside = origin.kind is not ClientClass.OUTSIDE
        if any(_is_answered(each, is_inside) for each in of_address):
            return Verdict.ANSWERED, Reason.ECHO_ANSWERED
        return Verdict.DROPPED, Reason.ECHO_NOT_ANSWERED
    if situation.behavior.unused_cluster_ips is Unused.PORTS_REJECTED and FrontendKind.CLUSTER_IP in kinds:
        return Verdict.REJECTED, Reason.ECHO_NOT_ANSWERED
    return Verdict.ROUTED, Reason.ROUTED


def _is_answered(served: Served, is_inside: bool) -> bool:
    """Whether the frontend redirects or rejects the client's packets (bpf/echo.h)."""
    policy = served.frontend.pod if is_inside else served.frontend.outside
    if served.plan.no_endpoint_action is NoEndpointAction.REJECT:
        return True
    return bool(served.plan.usable(policy.scope))
