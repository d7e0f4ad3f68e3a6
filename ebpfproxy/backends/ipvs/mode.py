"""The definition of mode ipvs."""

from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.backends.ipvs import cleanup, prerequisites
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.entries import DEFAULT_SCHEDULER, IpvsSettings
from ebpfproxy.backends.netfilter.node_support import families_used
from ebpfproxy.config import Config
from ebpfproxy.model.address import Family
from ebpfproxy.model.balancing import Algorithm, Forwarding
from ebpfproxy.plan.balancing import Support


class IpvsMode(Mode):
    name = "ipvs"
    uses_kernel_nat = True
    balancing = Support(frozenset(Algorithm) - {Algorithm.RANDOM}, weights=True, forwarding=True, resets=True)

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return prerequisites.probe(
            ipvs_settings(config).scheduler,
            config.iptables_backend,
            families_used(config),
            tunnels=ipvs_settings(config).forwarding is Forwarding.TUNNEL,
        )

    def serve(self, config: Config, callbacks: Callbacks) -> IpvsBackend:
        return _backend(config).serves(config, callbacks)

    def inspect(self, config: Config) -> IpvsBackend:
        backend = _backend(config).reads(config)
        backend.open_to_read()
        return backend

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        if beside_kube_proxy:
            return cleanup.remove_beside_kube_proxy(dry_run)
        return cleanup.remove(config.ipvs_exclude_cidrs, dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.drain(config.ipvs_exclude_cidrs, translates)


def ipvs_settings(config: Config) -> IpvsSettings:
    return IpvsSettings(
        scheduler=config.ipvs_scheduler or DEFAULT_SCHEDULER,
        forwarding=Forwarding(config.ipvs_forwarding),
        exclude_cidrs=config.ipvs_exclude_cidrs,
        masquerade_all=config.masquerade_all,
        masquerade_bit=config.iptables_masquerade_bit,
        strict_arp=config.ipvs_strict_arp,
        tcp_timeout=config.ipvs_tcp_timeout,
        tcp_fin_timeout=config.ipvs_tcpfin_timeout,
        udp_timeout=config.ipvs_udp_timeout,
    )


def _backend(config: Config) -> IpvsBackend:
    return IpvsBackend(ipvs_settings(config), config.iptables_backend)
