"""What a hash of the client selects in mode ebpf."""

from collections.abc import Iterator

from ebpfproxy.backends.ebpf.services import maglev
from ebpfproxy.backends.ebpf.services.client_hash import client_hash, entry_of
from ebpfproxy.diagnose.explain.decision import Case, Decision
from ebpfproxy.diagnose.explain.origin import EBPF
from ebpfproxy.diagnose.explain.result import Via
from ebpfproxy.model.address import family
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.planned_endpoints import target_of

BY_NETNS = "the network namespace identifies the client of a socket"
BY_RANDOM = "a socket has no port yet: a random number takes the place of the hash"


def hash_lines(case: Case, decision: Decision) -> Iterator[str]:
    """Yield what identifies the client, and the endpoint that it gets if that is known. Nothing without a
    hash, or in another mode."""
    algorithm = decision.served.plan.balancing.algorithm
    if case.situation.mode != EBPF or algorithm not in (Algorithm.SOURCE_HASH, Algorithm.MAGLEV):
        return
    if case.path.via is Via.SOCKET:
        yield BY_NETNS if algorithm is Algorithm.SOURCE_HASH else BY_RANDOM
        return
    client = case.origin.address(family(case.destination.address))
    if algorithm is Algorithm.SOURCE_HASH and client is not None:
        weighted = decision.weighted()
        targets = [target_of(each.address, each.port) for each, _ in weighted]
        entries = maglev.table(targets, [weight for _, weight in weighted])
        selected, _ = weighted[entries[entry_of(client_hash(client), len(entries))]]
        yield f"this client gets {selected}"
