"""The definition of mode ipvs."""

from collections.abc import Callable, Iterable, Iterator

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.ipvs import cleanup, prerequisites, probes
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.entries import Key, Server
from ebpfproxy.backends.ipvs.settings import DEFAULT_SCHEDULER, IpvsSettings
from ebpfproxy.backends.mode import BackendInspection, Callbacks, Inspection, Parts
from ebpfproxy.backends.netfilter import families_used
from ebpfproxy.backends.netfilter.sync_hooks import NetfilterHooks, netfilter_settings
from ebpfproxy.backends.netfilter.tracked_protocols import sctp_is_unserved
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.model.address import Family
from ebpfproxy.model.balancing import Algorithm, Forwarding
from ebpfproxy.plan.balancing import Support
from ebpfproxy.plan.service_plan import Frontend


class IpvsMode:
    """Implements `Mode`."""

    name = "ipvs"
    uses_kernel_nat = True
    balancing = Support(frozenset(Algorithm) - {Algorithm.RANDOM}, weights=True, forwarding=True)

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(
            ipvs_settings(config).scheduler,
            config.iptables_backend,
            families_used.used(config),
            tunnels=ipvs_settings(config).forwarding is Forwarding.TUNNEL,
        )

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return ()

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        backend = IpvsBackend(ipvs_settings(config), config.iptables_backend)
        sync_hooks = NetfilterHooks(netfilter_settings(config, self.name), callbacks, frontends)
        context = plan_context(config, self.name, sctp_is_unserved())
        return Parts(
            backend,
            context,
            sync_counts=backend.counts,
            sync_hooks=sync_hooks,
            maintain=backend.maintain,
            outdated=backend.outdated,
        )

    def inspect(self, config: Config) -> Inspection:
        settings = ipvs_settings(config)
        backend = IpvsBackend(settings, config.iptables_backend)
        backend.open_to_read()
        context = plan_context(config, self.name, sctp_is_unserved())
        return BackendInspection(
            backend, context, further=lambda: prerequisites.differing_sysctls(settings.strict_arp)
        )

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


def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
    """Return the frontends that IPVS translates.

    >>> from ebpfproxy.backends.ipvs.entries import Local
    >>> from ebpfproxy.model.address import Family, Protocol, parse_address
    >>> address = parse_address("10.96.0.1")
    >>> dns = Server(Family.IPV4, Frontend(address, 53, Protocol.UDP))
    >>> [str(each) for each in frontends([dns, Local(Family.IPV4, address)])]
    ['10.96.0.1:53/UDP']
    """
    return (key.frontend for key in keys if isinstance(key, Server))
