"""Mode nftables."""

from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.mode import Callbacks, Parts
from ebpfproxy.backends.netfilter import families_used
from ebpfproxy.backends.netfilter.sync_hooks import NetfilterHooks, netfilter_settings
from ebpfproxy.backends.nftables import cleanup, probes
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.frontends import frontends
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.model.address import Family


class NftablesMode:
    """See `Mode`."""

    name = "nftables"
    uses_kernel_nat = True

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(families_used.used(config))

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return ()

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        backend = NftablesBackend(nftables_settings(config))
        sync_hooks = NetfilterHooks(netfilter_settings(config, self.name), callbacks, frontends)
        return Parts(backend, plan_context(config, self.name), sync_hooks=sync_hooks)

    def remove(self, config: Config, dry_run: bool = False) -> list[str]:
        return cleanup.remove(dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.drain(translates)


def nftables_settings(config: Config) -> NftablesSettings:
    return NftablesSettings(masquerade_bit=config.iptables_masquerade_bit)
