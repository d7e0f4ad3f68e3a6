"""The sync hooks of the modes that use the kernel's NAT: sysctls, and the end of stale UDP flows."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ebpfproxy.backends.mode import Callbacks
from ebpfproxy.backends.netfilter import sysctls
from ebpfproxy.backends.netfilter.stale_conntrack import SearchResult, StaleConntrack
from ebpfproxy.backends.netfilter.sysctls import NetfilterSettings, answers_on_loopback
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.plan.service_plan import Frontend, NodePlan, PlanKey, ServicePortPlan


class NetfilterHooks:
    """Sets sysctls of conntrack and ends stale UDP flows. Implements `SyncHooks`.

    `frontends` converts keys of the backend into their frontends. `loopback_guard` contains the keys of the
    entries that must be in the kernel before packets from and to 127.0.0.0/8 may be routed.
    """

    def __init__(
        self,
        settings: NetfilterSettings,
        callbacks: Callbacks,
        frontends: Callable[[Iterable[Any]], Iterable[Frontend]],
        loopback_guard: Collection[Any] = (),
    ) -> None:
        self._settings = settings
        self._callbacks = callbacks
        self._frontends = frontends
        self._loopback_guard = loopback_guard
        self._routes_localnet = False  # whether it was set or the attempt failed
        self._stale: StaleConntrack | None = None

    def opened(self) -> None:
        sysctls.apply(sysctls.desired_sysctls(self._settings, sysctls.online_cpus()))
        self._stale = StaleConntrack(self._count)

    def left_over(self, keys: Collection[Any]) -> None:
        if self._stale:
            self._stale.inherit(self._frontends(keys))

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None) -> None:
        if self._stale:
            self._stale.expect(changed, node)

    def in_force(self, rejected: Collection[PlanKey], holds: Callable[[Collection[Any]], bool]) -> None:
        if self._may_route_localnet(holds):
            self._routes_localnet = True
            sysctls.apply((sysctls.ROUTE_LOCALNET,))
        if self._stale:
            self._stale.in_force(rejected)

    def _may_route_localnet(self, holds: Callable[[Collection[Any]], bool]) -> bool:
        """Return whether route_localnet is wanted, is not set yet, and is safe now (CVE-2020-8558)."""
        if self._routes_localnet or not self._settings.route_localnet:
            return False
        return bool(self._loopback_guard) and holds(self._loopback_guard)

    def restored(self) -> None:
        if self._stale:
            self._stale.search()  # for flows that clients started while there were no rules

    def close(self) -> None:
        if self._stale:
            self._stale.close()
            self._stale = None

    def _count(self, result: SearchResult) -> None:
        """Report a search. Called in the thread that searches."""
        self._callbacks.stale_removed(result.deleted, result.failed)
        self._callbacks.flows_looked_at(result.family, result.deleted, result.seconds)


def netfilter_settings(config: Config, mode: str) -> NetfilterSettings:
    """Return the settings of mode nftables, iptables or ipvs. Raises ConfigError if the node has no name."""
    return NetfilterSettings(
        max_per_core=config.conntrack_max_per_core,
        min_entries=config.conntrack_min,
        tcp_established=config.conntrack_tcp_timeout_established,
        tcp_close_wait=config.conntrack_tcp_timeout_close_wait,
        tcp_be_liberal=config.conntrack_tcp_be_liberal,
        udp=config.conntrack_udp_timeout,
        udp_stream=config.conntrack_udp_timeout_stream,
        route_localnet=mode == "iptables" and answers_on_loopback(plan_context(config, mode)),
    )
