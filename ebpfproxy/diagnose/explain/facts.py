"""What an explanation says about the kernel: session affinity, rules of other programs, and differences."""

import dataclasses
from collections.abc import Callable, Sequence

from ebpfproxy.backends.ebpf.inspect.client_view import AffinityRow
from ebpfproxy.backends.firewall_checks import Dropping
from ebpfproxy.diagnose.explain.origin import Origin, address_of
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import ClientClass, Explanation, Step, Verdict, Via
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.model.address import contains, family, format_address


def with_affinity(
    explanation: Explanation,
    situation: Situation,
    origin: Origin,
    affinities: Callable[[], Sequence[AffinityRow]],
) -> Explanation:
    """Add the endpoint that the client has by session affinity in the maps of mode ebpf, if the Service has
    that."""
    found = _affinity_step(explanation, situation, origin, affinities)
    if found is None:
        return explanation
    steps: list[Step] = []
    for step in explanation.steps:
        steps.append(step)
        if step.reason in (Reason.AFFINITY_BY_NETNS, Reason.AFFINITY_BY_ADDRESS):
            steps.append(found)
    return dataclasses.replace(explanation, steps=tuple(steps))


def with_firewall(
    explanation: Explanation, origin: Origin, situation: Situation, dropping: Callable[[], Dropping | None]
) -> Explanation:
    """Add what drops packets from outside to endpoints (`firewall_checks.dropping`), if that concerns the
    connection: a process of the node receives without FORWARD."""
    local = situation.state.local_networks
    is_forwarded = any(
        each.used and not any(contains(net, each.address) for net in local) for each in explanation.endpoints
    )
    is_packet = explanation.path is not None and explanation.path.via is Via.PACKET
    is_outside = origin.kind is ClientClass.OUTSIDE and explanation.verdict is Verdict.CONNECTS
    found = dropping() if is_outside and is_packet and is_forwarded else None
    if found is None:
        return explanation
    step = Step(Reason.FORWARD_DROPS, f"{Reason.FORWARD_DROPS.meaning}: {found}")
    steps = (*explanation.steps[:-1], step, explanation.steps[-1])
    return dataclasses.replace(explanation, steps=steps, is_blocked=found.is_certain)


def with_facts(explanation: Explanation, differences: Sequence[str]) -> Explanation:
    """Add the step of the comparison, before the outcome."""
    why = Reason.DISAGREES if differences else Reason.AGREES
    step = Step(why, why.meaning, tuple(differences))
    steps = (*explanation.steps[:-1], step, explanation.steps[-1])
    return dataclasses.replace(explanation, steps=steps, disagreements=tuple(differences))


def _affinity_step(
    explanation: Explanation,
    situation: Situation,
    origin: Origin,
    affinities: Callable[[], Sequence[AffinityRow]],
) -> Step | None:
    served, path = explanation.served, explanation.path
    if served is None or path is None or explanation.destination is None or not served.plan.affinity_timeout:
        return None
    client = f"netns {origin.cookie}"
    if Reason.AFFINITY_BY_NETNS not in {each.reason for each in explanation.steps}:
        address = address_of(origin, situation, family(explanation.destination.address))
        client = format_address(address) if address else ""
    usable = {str(each) for each in explanation.endpoints if each.used}
    for row in affinities():
        if row.service == str(served.plan.name) and row.client == client and row.endpoint in usable:
            text = f"{Reason.AFFINITY_KNOWN.meaning}: {row.endpoint}, last used {row.age:.0f} s ago"
            return Step(Reason.AFFINITY_KNOWN, text)
    return Step(Reason.AFFINITY_UNKNOWN, Reason.AFFINITY_UNKNOWN.meaning)
