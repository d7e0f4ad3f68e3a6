"""The definition of mode nftables."""

from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.backends.netfilter.node_support import families_used
from ebpfproxy.backends.nftables import cleanup, probes
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.backends.nftables.shares import DRAWS
from ebpfproxy.config import Config
from ebpfproxy.model.address import Family
from ebpfproxy.plan.balancing import Support


class NftablesMode(Mode):
    name = "nftables"
    uses_kernel_nat = True
    balancing = Support(frozenset(DRAWS), weights=True, resets=True)

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(families_used(config))

    def serve(self, config: Config, callbacks: Callbacks) -> NftablesBackend:
        return NftablesBackend(nftables_settings(config)).serves(config, callbacks)

    def inspect(self, config: Config) -> NftablesBackend:
        backend = NftablesBackend(nftables_settings(config)).reads(config)
        backend.open()
        return backend

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        return (cleanup.remove_beside_kube_proxy if beside_kube_proxy else cleanup.remove)(dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.drain(translates)


def nftables_settings(config: Config) -> NftablesSettings:
    return NftablesSettings(masquerade_bit=config.iptables_masquerade_bit)
