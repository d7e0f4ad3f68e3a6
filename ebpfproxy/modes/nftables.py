"""Mode nftables."""

from collections.abc import Callable

from ebpfproxy.config import Config
from ebpfproxy.config.derived import netfilter_settings, nftables_settings, plan_context
from ebpfproxy.dataplanes.findings import Finding
from ebpfproxy.dataplanes.nftables import probes, removal
from ebpfproxy.dataplanes.nftables.dataplane import NftablesDataplane
from ebpfproxy.dataplanes.nftables.served import frontends
from ebpfproxy.model.address import Family
from ebpfproxy.modes import families
from ebpfproxy.modes.mode import Callbacks, Parts
from ebpfproxy.modes.netfilter import Netfilter


class NftablesMode:
    """See `Mode`."""

    name = "nftables"
    uses_kernel_nat = True

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(families.used(config))

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return ()

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        dataplane = NftablesDataplane(nftables_settings(config))
        beside = Netfilter(netfilter_settings(config, self.name), callbacks, frontends)
        return Parts(dataplane, plan_context(config, self.name), beside=beside)

    def remove(self, config: Config, dry_run: bool = False) -> list[str]:
        return removal.remove(dry_run)

    def retire(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return removal.retire(translates)
