"""What the backends that use the kernel's NAT share: sysctls, conntrack, the end of stale UDP flows, and
resets of TCP connections."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from ebpfproxy.backends.connection_resets import ConnectionResets, pace
from ebpfproxy.backends.interface import Backend, Callbacks
from ebpfproxy.backends.netfilter import sysctls
from ebpfproxy.backends.netfilter.node_support import sctp_is_unserved
from ebpfproxy.backends.netfilter.stale_conntrack import SearchResult, StaleConntrack
from ebpfproxy.backends.netfilter.sysctls import NetfilterSettings, answers_on_loopback
from ebpfproxy.backends.netfilter.tracked_connections import TrackedConnections
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.model.connection import Connection, Translation
from ebpfproxy.plan.service_plan import Frontend, NodePlan, PlanKey, ServicePortPlan

K = TypeVar("K")
E = TypeVar("E")


class NatBackend(Backend[K, E]):
    """A backend whose rules the kernel's NAT applies. After `serves`, it accompanies syncs."""

    loopback_guard: ClassVar[Collection[Any]] = ()
    """The keys of the entries that must be in the kernel before packets from and to 127.0.0.0/8 may be
    routed."""
    _settings_of_nat: NetfilterSettings | None = None
    _callbacks = Callbacks()
    _routes_localnet = False  # whether it was set or the attempt failed
    _stale: StaleConntrack | None = None
    _resets: ConnectionResets[conntrack.Flow] | None = None

    @staticmethod
    @abstractmethod
    def frontends(keys: Iterable[K]) -> Iterable[Frontend]:
        """Return the frontends that entries with these keys translate, reject or drop."""

    def reads(self, config: Config) -> Self:
        """Set `context`; that is all a reader needs. Raises ConfigError if the node has no name."""
        self.context = plan_context(config, self.name, sctp_is_unserved())
        return self

    def serves(self, config: Config, callbacks: Callbacks) -> Self:
        """Set `context`, and what to do beside syncs. Raises ConfigError if the node has no name."""
        self._settings_of_nat = netfilter_settings(config, self.name)
        self._callbacks = callbacks
        connections = TrackedConnections(config.proc_root)
        self._resets = ConnectionResets(connections, pace(config), callbacks)
        return self.reads(config)

    def opened(self) -> None:
        if self._settings_of_nat:
            sysctls.apply(sysctls.desired_sysctls(self._settings_of_nat, sysctls.online_cpus()))
            self._stale = StaleConntrack(self._count)

    def left_over(self, keys: Collection[K]) -> None:
        if self._stale:
            self._stale.inherit(self.frontends(keys))

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None) -> None:
        if self._stale:
            self._stale.expect(changed, node)
        if self._resets:
            self._resets.expect(changed, node)

    def in_force(
        self, rejected: Callable[[], Collection[PlanKey]], holds: Callable[[Collection[K]], bool]
    ) -> None:
        if self._may_route_localnet(holds):
            self._routes_localnet = True
            sysctls.apply((sysctls.ROUTE_LOCALNET,))
        if self._stale:
            self._stale.in_force(rejected())
        if self._resets:
            self._resets.in_force(rejected)

    def _may_route_localnet(self, holds: Callable[[Collection[K]], bool]) -> bool:
        """Return whether route_localnet is wanted, is not set yet, and is safe now (CVE-2020-8558)."""
        if self._routes_localnet or not (self._settings_of_nat and self._settings_of_nat.route_localnet):
            return False
        return bool(self.loopback_guard) and holds(self.loopback_guard)

    def restored(self) -> None:
        if self._stale:
            self._stale.search()  # for flows that clients started while there were no rules

    def close(self) -> None:
        if self._stale:
            self._stale.close()
            self._stale = None
        if self._resets:
            self._resets.close()

    def endpoint_of(self, connection: Connection) -> Translation | None:
        """As conntrack has it: there is no other record."""
        flow = conntrack.find(connection)
        endpoint = (flow.reply_source, flow.reply_source_port) if flow else connection.frontend
        return Translation(endpoint) if endpoint != connection.frontend else None

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
