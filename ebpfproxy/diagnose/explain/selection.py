"""How one of the usable endpoints is selected: the algorithm and the weights."""

from collections.abc import Iterator

from ebpfproxy.backends import selection
from ebpfproxy.backends.ebpf.services import maglev
from ebpfproxy.backends.ebpf.services.client_hash import client_hash, entry_of
from ebpfproxy.diagnose.explain.decision import Case, Decision
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import EndpointResult, Step, Via
from ebpfproxy.model.address import family
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.balancing import unsupported
from ebpfproxy.plan.planned_endpoints import target_of

_REASONS = {
    Algorithm.RANDOM: Reason.RANDOM,
    Algorithm.ROUND_ROBIN: Reason.ROUND_ROBIN,
    Algorithm.SOURCE_HASH: Reason.SOURCE_HASH,
    Algorithm.MAGLEV: Reason.MAGLEV,
    Algorithm.LEAST_CONNECTIONS: Reason.LEAST_CONNECTIONS,
}


def algorithm_steps(case: Case, decision: Decision) -> Iterator[Step]:
    """Yield the algorithm of the mode in use, with weights other than 1, and what the mode cannot honor."""
    planned = decision.served.plan.balancing
    support = next(each.balancing for each in selection.MODES if each.name == case.situation.mode)
    algorithm = planned.algorithm if planned.algorithm in support.algorithms else None
    why = _REASONS[algorithm or Algorithm.RANDOM]
    weights = _weights(decision) if support.weights else {}
    selected = _selected(case, decision, weights) if algorithm is Algorithm.SOURCE_HASH else None
    text = why.meaning + (f": this client gets {selected}" if selected else "")
    used = [each for each in decision.endpoints if each.used]
    shown = tuple(f"{each}: weight {weights[each]}" for each in used) if weights else ()
    yield Step(why, text, shown)
    ignored = tuple(unsupported(planned, support))
    if ignored:
        yield Step(Reason.NOT_HONORED, Reason.NOT_HONORED.meaning, ignored)


def _weights(decision: Decision) -> dict[EndpointResult, int]:
    """The weights of the usable endpoints. Empty if all are 1."""
    plan = decision.served.plan
    if not plan.balancing.weights:
        return {}
    pairs = zip(plan.endpoints, plan.balancing.weights, strict=True)
    known = {(each.address, each.port): weight for each, weight in pairs}
    return {each: known.get((each.address, each.port), 1) for each in decision.endpoints if each.used}


def _selected(case: Case, decision: Decision, weights: dict[EndpointResult, int]) -> EndpointResult | None:
    """The endpoint that the hash of the client's address selects. None if the address is unknown, or if the
    network namespace takes its place."""
    client = case.origin.address(family(case.destination.address))
    if client is None or case.path.via is not Via.PACKET:
        return None
    used = [each for each in decision.endpoints if each.used]
    targets = [target_of(each.address, each.port) for each in used]
    entries = maglev.table(targets, [weights[each] for each in used] if weights else [])
    return used[entries[entry_of(client_hash(client), len(entries))]]
