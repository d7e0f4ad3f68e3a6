"""Selects the IPVS scheduler of a ServicePort. Pure.

IPVS has no scheduler that selects at random, so `Algorithm.RANDOM` is not supported (`IpvsMode.balancing`).
"""

from collections.abc import Callable

from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.balancing import PlannedBalancing

_BY_ALGORITHM = {
    Algorithm.ROUND_ROBIN: "rr",
    Algorithm.LEAST_CONNECTIONS: "lc",
    Algorithm.SOURCE_HASH: "sh",
    Algorithm.MAGLEV: "mh",
}
_WEIGHTED = {"rr": "wrr", "lc": "wlc"}
"""By scheduler that ignores weights: the one that selects in the same way, and honors them."""


def scheduler(
    planned: PlannedBalancing, default: str, is_available: Callable[[str], bool]
) -> tuple[str, str | None]:
    """Return the scheduler, and the preferred one if this kernel lacks that, else None.

    `default`: for ServicePorts that request no algorithm, and instead of one that the kernel lacks.

    >>> from ebpfproxy.plan.balancing import PlannedBalancing
    >>> scheduler(PlannedBalancing(Algorithm.ROUND_ROBIN, weights=(1, 3)), "rr", lambda name: True)
    ('wrr', None)
    >>> scheduler(PlannedBalancing(Algorithm.MAGLEV), "rr", lambda name: False)
    ('rr', 'mh')
    """
    wanted = _BY_ALGORITHM.get(planned.algorithm, default) if planned.algorithm else default
    if planned.weights:
        wanted = _WEIGHTED.get(wanted, wanted)
    if wanted == default or is_available(wanted):
        return wanted, None
    return default, wanted
