"""What goes along with every mode that leaves translating to the kernel's own NAT."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ebpfproxy.dataplanes import netfilter_sysctls
from ebpfproxy.dataplanes.netfilter_sysctls import NetfilterSettings
from ebpfproxy.dataplanes.stale_conntrack import Look, StaleConntrack
from ebpfproxy.modes.mode import Callbacks
from ebpfproxy.plan.service_plan import Frontend, NodePlan, PlanKey, ServicePortPlan


class Netfilter:
    """The kernel's settings for connections that it tracks, and the end of UDP flows that no plan wants.

    See `Beside`. `frontends` tells which ones keys of the dataplane are about.
    """

    def __init__(
        self,
        settings: NetfilterSettings,
        callbacks: Callbacks,
        frontends: Callable[[Iterable[Any]], Iterable[Frontend]],
    ) -> None:
        self._settings = settings
        self._callbacks = callbacks
        self._frontends = frontends
        self._stale: StaleConntrack | None = None

    def opened(self) -> None:
        netfilter_sysctls.apply(netfilter_sysctls.wanted(self._settings, netfilter_sysctls.online_cpus()))
        self._stale = StaleConntrack(self._count)

    def left_over(self, keys: Collection[Any]) -> None:
        if self._stale:
            self._stale.inherit(self._frontends(keys))

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

    def _count(self, look: Look) -> None:
        """In the thread that looks."""
        self._callbacks.stale_removed(look.deleted, look.failed)
        self._callbacks.flows_looked_at(look.family, look.deleted, look.seconds)
