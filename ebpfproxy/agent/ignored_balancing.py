"""Reports what the mode in use cannot honor of the load balancing that Services or flags request."""

from collections.abc import Iterable

from ebpfproxy.log import Logger
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.balancing import PlannedBalancing, Support, default_algorithm, unsupported
from ebpfproxy.plan.direct_return import support_on_node
from ebpfproxy.plan.open_connections import requested_resets
from ebpfproxy.plan.service_plan import PlanContext, ServicePortPlan

log = Logger(__name__)

IGNORED = "Mode cannot honor the load balancing that a Service requests"
"""The Service is served with the default of the mode instead of `ignored`. Its annotations request it; or it
is a flag such as --lb-algorithm, --slow-start, --ebpf-forwarding or --rebalance, if there is no `service`."""


class IgnoredBalancing:
    """Logs each ignored request once until it changes."""

    def __init__(self, support: Support, context: PlanContext) -> None:
        self._support = support_on_node(support, context)
        algorithm = default_algorithm(context.algorithm, context.direct_return and self._support.dsr)
        of_node = PlannedBalancing(algorithm, slow_start=context.slow_start, dsr=context.direct_return)
        self._of_node = frozenset(unsupported(of_node, self._support, _requests(context)))
        self._reported: dict[NamespacedName | None, frozenset[str]] = {}

    def update(self, name: NamespacedName, plans: Iterable[ServicePortPlan]) -> None:
        """Take the plans of one Service; none if it was deleted."""
        if self._of_node and not self._reported.get(None):
            self._report(None, self._of_node)
        ignored = {
            text
            for plan in plans
            for text in unsupported(plan.balancing, self._support, requested_resets(plan))
        }
        self._report(name, ignored - self._of_node)

    def _report(self, name: NamespacedName | None, ignored: Iterable[str]) -> None:
        texts = frozenset(ignored)
        if not texts:
            self._reported.pop(name, None)
        elif texts != self._reported.get(name):
            self._reported[name] = texts
            about = {"service": str(name)} if name else {}
            log.warning(IGNORED, **about, ignored=", ".join(sorted(texts)))


def _requests(context: PlanContext) -> list[str]:
    """Return what `requested_resets` returns for a Service without annotations."""
    found = ["removed-endpoints reset"] if context.reset_removed else []
    return found + ([f"rebalance {context.rebalance}"] if context.rebalance else [])
