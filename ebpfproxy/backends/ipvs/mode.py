"""Mode ipvs."""

from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.ipvs import cleanup, probes
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.frontends import frontends
from ebpfproxy.backends.ipvs.settings import DEFAULT_SCHEDULER, IpvsSettings
from ebpfproxy.backends.mode import Callbacks, Parts
from ebpfproxy.backends.netfilter import families_used
from ebpfproxy.backends.netfilter.sync_hooks import NetfilterHooks, netfilter_settings
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.model.address import Family


class IpvsMode:
    """See `Mode`."""

    name = "ipvs"
    uses_kernel_nat = True

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(
            ipvs_settings(config).scheduler, config.iptables_backend, families_used.used(config)
        )

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return ()

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        backend = IpvsBackend(ipvs_settings(config), config.iptables_backend)
        sync_hooks = NetfilterHooks(netfilter_settings(config, self.name), callbacks, frontends)
        return Parts(backend, plan_context(config, self.name), sync_hooks=sync_hooks)

    def remove(self, config: Config, dry_run: bool = False) -> list[str]:
        return cleanup.remove(config.ipvs_exclude_cidrs, dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.drain(config.ipvs_exclude_cidrs, translates)


def ipvs_settings(config: Config) -> IpvsSettings:
    return IpvsSettings(
        scheduler=config.ipvs_scheduler or DEFAULT_SCHEDULER,
        exclude_cidrs=config.ipvs_exclude_cidrs,
        masquerade_all=config.masquerade_all,
        masquerade_bit=config.iptables_masquerade_bit,
        strict_arp=config.ipvs_strict_arp,
        tcp_timeout=config.ipvs_tcp_timeout,
        tcp_fin_timeout=config.ipvs_tcpfin_timeout,
        udp_timeout=config.ipvs_udp_timeout,
    )
