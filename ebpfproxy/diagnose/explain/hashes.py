"""What a hash of the client selects in modes ebpf and nftables."""

from collections.abc import Iterator, Sequence

from ebpfproxy.backends.ebpf.services.client_hash import client_hash, entry_of
from ebpfproxy.backends.ebpf.services.slot_lists import TABLE_SIZES
from ebpfproxy.backends.nftables.shares import shares
from ebpfproxy.diagnose.explain.decision import Case, Decision
from ebpfproxy.diagnose.explain.lookup import NFTABLES
from ebpfproxy.diagnose.explain.origin import EBPF, address_of, is_by_namespace
from ebpfproxy.diagnose.explain.result import EndpointResult, Via
from ebpfproxy.model.address import Address, family
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan import maglev
from ebpfproxy.plan.planned_endpoints import target_of

BY_NETNS = "the network namespace identifies this client"
BY_RANDOM = "a socket has no port yet: a random number takes the place of the hash"
BY_PORT = "the client's port is part of the hash: add it to the address in --from"

_HASHES = (Algorithm.SOURCE_HASH, Algorithm.MAGLEV)
_Weighted = Sequence[tuple[EndpointResult, int]]


def hash_lines(case: Case, decision: Decision) -> Iterator[str]:
    """Yield what identifies the client, and the endpoint that it gets if that is known. Nothing without a
    hash, by a relay, or in another mode."""
    algorithm = decision.served.plan.balancing.algorithm
    is_by_hash = algorithm in _HASHES and case.path.via is not Via.RELAY
    if case.situation.mode not in (EBPF, NFTABLES) or not is_by_hash:
        return
    ip_family = family(case.destination.address)
    if case.path.via is Via.SOCKET:
        if algorithm is Algorithm.MAGLEV:
            yield BY_RANDOM
            return
        if is_by_namespace(case.origin, case.situation, ip_family):
            yield BY_NETNS
            return
    client = address_of(case.origin, case.situation, ip_family)
    if client is None:
        return
    if algorithm is Algorithm.MAGLEV and not case.origin.port:
        yield BY_PORT
        return
    port = case.origin.port if algorithm is Algorithm.MAGLEV else 0
    is_ebpf = case.situation.mode == EBPF
    selected = _by_table(decision.weighted(), client, port) if is_ebpf else _by_rule(decision, client, port)
    yield f"this client gets {selected}"


def _by_table(weighted: _Weighted, client: Address, port: int) -> EndpointResult:
    """Return what the BPF programs select."""
    targets = [target_of(each.address, each.port) for each, _ in weighted]
    entries = maglev.table(targets, [weight for _, weight in weighted], TABLE_SIZES.of(len(targets)))
    selected, _ = weighted[entries[entry_of(client_hash(client, port), len(entries))]]
    return selected


def _by_rule(decision: Decision, client: Address, port: int) -> EndpointResult:
    """Return what the rules of nftables select."""
    plan = decision.served.plan
    used = {(each.address, each.port): each for each in decision.endpoints if each.used}
    found = shares(tuple(plan.endpoints), plan.balancing, lambda each: each[:2] in used)
    assert found
    selected = found.selected(client, port, bool(plan.affinity_timeout))
    return used[selected.address, selected.port]
