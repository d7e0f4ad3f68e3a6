"""Mode ipvs."""

from collections.abc import Callable

from ebpfproxy.config import Config
from ebpfproxy.config.derived import ipvs_settings, netfilter_settings, plan_context
from ebpfproxy.dataplanes.findings import Finding
from ebpfproxy.dataplanes.ipvs import probes, removal
from ebpfproxy.dataplanes.ipvs.dataplane import IpvsDataplane
from ebpfproxy.dataplanes.ipvs.served import frontends
from ebpfproxy.model.address import Family
from ebpfproxy.modes import families
from ebpfproxy.modes.mode import Callbacks, Parts
from ebpfproxy.modes.netfilter import Netfilter


class IpvsMode:
    """See `Mode`."""

    name = "ipvs"
    uses_kernel_nat = True

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(ipvs_settings(config).scheduler, config.iptables_flavour, families.used(config))

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return ()

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        dataplane = IpvsDataplane(ipvs_settings(config), config.iptables_flavour)
        beside = Netfilter(netfilter_settings(config, self.name), callbacks, frontends)
        return Parts(dataplane, plan_context(config, self.name), beside=beside)

    def remove(self, config: Config, dry_run: bool = False) -> list[str]:
        return removal.remove(config.ipvs_exclude_cidrs, dry_run)

    def retire(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return removal.retire(config.ipvs_exclude_cidrs, translates)
