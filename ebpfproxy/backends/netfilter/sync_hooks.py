"""What goes along with every mode that leaves translating to the kernel's own NAT."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ebpfproxy.backends.mode import Callbacks
from ebpfproxy.backends.netfilter import sysctls
from ebpfproxy.backends.netfilter.stale_conntrack import Look, StaleConntrack
from ebpfproxy.backends.netfilter.sysctls import NetfilterSettings, answers_on_loopback
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.plan.service_plan import Frontend, NodePlan, PlanKey, ServicePortPlan


class Netfilter:
    """The kernel's settings for connections that it tracks, and the end of UDP flows that no plan wants.

    See `SyncHooks`. `frontends` maps keys of the backend to their frontends. `loopback_guard`: the keys of
    the entries that must be in the kernel before packets from and to 127.0.0.0/8 may be routed.
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
        self._routes_localnet = False  # whether it was set, or tried
        self._stale: StaleConntrack | None = None

    def opened(self) -> None:
        sysctls.apply(sysctls.wanted(self._settings, sysctls.online_cpus()))
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
        """Whether that is wanted, has not been done yet, and is safe by now (CVE-2020-8558)."""
        if self._routes_localnet or not self._settings.route_localnet:
            return False
        return bool(self._loopback_guard) and holds(self._loopback_guard)

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


def netfilter_settings(config: Config, mode: str) -> NetfilterSettings:
    """`mode` is nftables, iptables or ipvs. Raises ConfigError where the node has no name."""
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
