"""How large the cluster is, of which kube-proxy makes a difference."""

from collections.abc import Iterable

from ebpfproxy.model.address import Family
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.service import NamespacedName, Service

LARGE = 1000
"""A family with more endpoints than so many, over all ports of all Services, is large
(largeClusterEndpointsThreshold in pkg/proxy/iptables/proxier.go)."""


class ClusterSize:
    """Endpoints of all Services by family, whether they are ready or not; kept up Service by Service."""

    def __init__(self) -> None:
        self._counts: dict[NamespacedName, dict[Family, int]] = {}
        self._totals = dict.fromkeys(Family, 0)

    @property
    def large(self) -> frozenset[Family]:
        return frozenset(of for of, total in self._totals.items() if total > LARGE)

    def update(self, name: NamespacedName, service: Service | None, slices: Iterable[EndpointSlice]) -> None:
        """`service` is None where it is gone; `slices` are all of its own."""
        counts = _counts(service, slices) if service else {}
        previous = self._counts.pop(name, {})
        if counts:
            self._counts[name] = counts
        for sign, some in ((-1, previous), (1, counts)):
            for of, count in some.items():
                self._totals[of] += sign * count


def _counts(service: Service, slices: Iterable[EndpointSlice]) -> dict[Family, int]:
    ports = {(port.name, port.protocol) for port in service.ports}
    counts: dict[Family, int] = {}
    for piece in slices:
        matching = sum((port.name, port.protocol) in ports for port in piece.ports)
        counts[piece.family] = counts.get(piece.family, 0) + matching * len(piece.endpoints)
    return counts
