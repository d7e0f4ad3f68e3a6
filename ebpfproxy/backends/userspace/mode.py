"""The definition of mode userspace."""

from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.backends.userspace import cleanup, probes
from ebpfproxy.backends.userspace.backend import UserspaceBackend
from ebpfproxy.backends.userspace.inspection import UserspaceInspection
from ebpfproxy.backends.userspace.relay.balancer import ALGORITHMS
from ebpfproxy.backends.userspace.settings import UserspaceSettings, one_per_cpu
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.model.address import Family
from ebpfproxy.plan.balancing import Support

_DEFAULT = UserspaceSettings()
_SCTP_UNSERVED = "mode userspace relays TCP and UDP only"


class UserspaceMode(Mode):
    name = "userspace"
    uses_kernel_nat = False
    balancing = Support(frozenset(ALGORITHMS), weights=True)

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe()

    def serve(self, config: Config, callbacks: Callbacks) -> UserspaceBackend:
        backend = UserspaceBackend(userspace_settings(config), callbacks.changed)
        backend.context = plan_context(config, self.name, _SCTP_UNSERVED)
        return backend

    def inspect(self, config: Config) -> UserspaceInspection:
        return UserspaceInspection(plan_context(config, self.name, _SCTP_UNSERVED))

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        return cleanup.remove(dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.remove(), False


def userspace_settings(config: Config) -> UserspaceSettings:
    unreplied = config.conntrack_udp_timeout or _DEFAULT.udp_unreplied_timeout
    return UserspaceSettings(
        relays=config.userspace_relays or one_per_cpu(),
        tcp_timeout=config.conntrack_tcp_timeout_established or _DEFAULT.tcp_timeout,
        tcp_closing_timeout=config.conntrack_tcp_timeout_close_wait or _DEFAULT.tcp_closing_timeout,
        udp_timeout=config.udp_timeout,
        udp_unreplied_timeout=max(unreplied, config.udp_timeout),
        udp_flows=config.userspace_udp_flows_max,
        affinity_clients=config.userspace_affinity_max,
    )
