"""What goes along with every mode that leaves translating to the kernel's own NAT."""

from collections.abc import Callable, Collection, Mapping

from ebpfproxy.dataplanes import netfilter_sysctls
from ebpfproxy.dataplanes.netfilter_sysctls import NetfilterSettings
from ebpfproxy.dataplanes.stale_conntrack import StaleConntrack
from ebpfproxy.plan.service_plan import NodePlan, PlanKey, ServicePortPlan


class Netfilter:
    """The kernel's settings for connections that it tracks, and the end of UDP flows that no plan wants.

    See `Beside`. `counted` is called in a thread of its own, as `Callbacks.stale_removed` is.
    """

    def __init__(self, settings: NetfilterSettings, counted: Callable[[int, int], object]) -> None:
        self._settings = settings
        self._counted = counted
        self._stale: StaleConntrack | None = None

    def opened(self) -> None:
        netfilter_sysctls.apply(netfilter_sysctls.wanted(self._settings, netfilter_sysctls.online_cpus()))
        self._stale = StaleConntrack(lambda look: self._counted(look.deleted, look.failed))

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None) -> None:
        if self._stale:
            self._stale.expect(changed, node)

    def in_force(self, refused: Collection[PlanKey]) -> None:
        if self._stale:
            self._stale.in_force(refused)

    def restored(self) -> None:
        if self._stale:
            self._stale.look()  # for what clients began without any rule

    def close(self) -> None:
        if self._stale:
            self._stale.close()
            self._stale = None
