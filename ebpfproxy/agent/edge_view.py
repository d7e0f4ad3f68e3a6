"""What the plans of an edge mean outside the kernel: addresses to announce, and nodes to check."""

from collections import Counter
from collections.abc import Iterable, Set
from typing import Any

from ebpfproxy.model.address import Address
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node_check import NodeCheck
from ebpfproxy.model.service import NamespacedName, Service
from ebpfproxy.plan.node_checks import plan_checks
from ebpfproxy.plan.service_plan import PlanKey, ServicePortPlan
from ebpfproxy.plan.vips import vips


class EdgeView:
    """Updated Service by Service and plan by plan, so that a change does not cost more in a large cluster."""

    def __init__(self) -> None:
        self._of_service: dict[NamespacedName, frozenset[NodeCheck]] = {}
        self._checks: Counter[NodeCheck] = Counter()
        self._vips: Counter[Address] = Counter()
        self._of_plan: dict[PlanKey, frozenset[Address]] = {}
        self.version = 0
        """Increases with each change of `checks`."""

    @property
    def vips(self) -> Set[Address]:
        """The addresses to announce. A live view."""
        return self._vips.keys()

    @property
    def checks(self) -> Set[NodeCheck]:
        """The checks of nodes that any Service needs. A live view."""
        return self._checks.keys()

    def update(self, name: NamespacedName, service: Service | None, slices: Iterable[EndpointSlice]) -> None:
        """Replace the checks of one Service. `service` is None if it is not served."""
        checks = plan_checks(service, slices) if service else frozenset()
        previous = self._of_service.pop(name, frozenset())
        if checks:
            self._of_service[name] = checks
        for check in checks - previous:
            self._checks[check] += 1
        for check in previous - checks:
            _subtract(self._checks, check)
        self.version += checks != previous

    def replace(self, key: PlanKey, plan: ServicePortPlan | None) -> None:
        """Replace the addresses of a plan that the next sync applies. None for a deleted one."""
        addresses = vips(plan) if plan else frozenset()
        for address in addresses:
            self._vips[address] += 1
        for address in self._of_plan.pop(key, ()):
            _subtract(self._vips, address)
        if addresses:
            self._of_plan[key] = addresses


def _subtract(counter: Counter[Any], key: object) -> None:
    """Count down, and remove a key that is counted no more."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
