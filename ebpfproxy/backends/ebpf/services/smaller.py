"""What is served of a ServicePort whose entry finds no room in a map."""

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry
from ebpfproxy.backends.ebpf.services.slot_lists import HASHING
from ebpfproxy.model.address import Address
from ebpfproxy.plan.planned_endpoints import ROW, TARGET_SIZE, WEIGHT_SHIFT, PlannedEndpoints

_SCOPES = abi.ENDPOINT_CLUSTER | abi.ENDPOINT_LOCAL
_WEIGHT = ~0 << WEIGHT_SHIFT & 0xFFFF


def plain(entry: ServicePortEntry) -> ServicePortEntry:
    """Return the entry with lists that have one slot for each endpoint: without weights and tables.

    Direct server return needs an algorithm with which every node selects the same endpoint.
    """
    if entry.tunnels:
        return entry
    rows = (
        ROW.pack(address, port, flags & ~_WEIGHT)
        for address, port, flags in ROW.iter_unpack(entry.endpoints.rows)
    )
    algorithm = abi.ALGORITHM_RANDOM if entry.algorithm in HASHING else entry.algorithm
    return entry._replace(endpoints=PlannedEndpoints.packed(b"".join(rows)), algorithm=algorithm)


def common(entry: ServicePortEntry, old: ServicePortEntry) -> ServicePortEntry:
    """Return `old` without the frontends, endpoints and source ranges that `entry` no longer has.

    It needs no room: its lists are parts of the old ones. If `entry` has other source ranges, the old ones
    stay: a client of both would be rejected otherwise.
    """
    frontends = {each[:3] for each in entry.frontends}
    wanted = dict(zip(entry.endpoints.targets(), entry.endpoints.flags(), strict=True))
    rows: list[bytes] = []
    tunnels: list[Address | None] = []
    for at, (address, port, has) in enumerate(ROW.iter_unpack(old.endpoints.rows)):
        flags = wanted.get(ROW.pack(address, port, has)[:TARGET_SIZE])
        if flags is not None:
            kept = has & _WEIGHT | flags & has & _SCOPES | flags & ~(_SCOPES | _WEIGHT)
            rows.append(ROW.pack(address, port, kept))
            tunnels += old.tunnels[at : at + 1]
    served = tuple(each for each in old.frontends if each[:3] in frontends)
    has_fewer_ranges = set(entry.source_ranges) < set(old.source_ranges) and entry.source_ranges
    kept_of_old = old._replace(
        frontends=served,
        endpoints=PlannedEndpoints.packed(b"".join(rows)),
        affinity_timeout=max(0, old.affinity_timeout),
        source_ranges=entry.source_ranges if has_fewer_ranges else old.source_ranges,
        tunnels=tuple(tunnels),
    )
    if served:
        return kept_of_old
    return kept_of_old._replace(affinity_timeout=0, algorithm=abi.ALGORITHM_RANDOM, slow_start=0)
