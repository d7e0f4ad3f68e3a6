"""Mode iptables."""

from collections.abc import Callable

from ebpfproxy.config import Config
from ebpfproxy.config.derived import iptables_settings, netfilter_settings, plan_context
from ebpfproxy.dataplanes.findings import Finding
from ebpfproxy.dataplanes.iptables import probes, removal
from ebpfproxy.dataplanes.iptables.dataplane import IptablesDataplane
from ebpfproxy.dataplanes.iptables.node_rules import LOOPBACK_GUARD
from ebpfproxy.dataplanes.iptables.served import frontends
from ebpfproxy.model.address import Family
from ebpfproxy.modes import families
from ebpfproxy.modes.mode import Callbacks, Parts
from ebpfproxy.modes.netfilter import Netfilter


class IptablesMode:
    """See `Mode`."""

    name = "iptables"
    uses_kernel_nat = True

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(config.iptables_flavour, families.used(config))

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return ()

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        dataplane = IptablesDataplane(iptables_settings(config), config.iptables_flavour)
        settings = netfilter_settings(config, self.name)
        beside = Netfilter(settings, callbacks, frontends, LOOPBACK_GUARD)
        return Parts(dataplane, plan_context(config, self.name), beside=beside)

    def remove(self, config: Config, dry_run: bool = False) -> list[str]:
        return removal.remove(dry_run)

    def retire(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return removal.retire(translates)
