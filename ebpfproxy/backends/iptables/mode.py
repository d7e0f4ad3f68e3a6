"""Mode iptables."""

from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.iptables import cleanup, probes
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.frontends import frontends
from ebpfproxy.backends.iptables.node_rules import LOOPBACK_GUARD
from ebpfproxy.backends.iptables.settings import IptablesSettings
from ebpfproxy.backends.mode import Callbacks, Parts
from ebpfproxy.backends.netfilter import families_used
from ebpfproxy.backends.netfilter.sync_hooks import NetfilterHooks, netfilter_settings
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.model.address import Family


class IptablesMode:
    """See `Mode`."""

    name = "iptables"
    uses_kernel_nat = True

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(config.iptables_backend, families_used.used(config))

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return ()

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        backend = IptablesBackend(iptables_settings(config), config.iptables_backend)
        settings = netfilter_settings(config, self.name)
        sync_hooks = NetfilterHooks(settings, callbacks, frontends, LOOPBACK_GUARD)
        return Parts(backend, plan_context(config, self.name), sync_hooks=sync_hooks)

    def remove(self, config: Config, dry_run: bool = False) -> list[str]:
        return cleanup.remove(dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.drain(translates)


def iptables_settings(config: Config) -> IptablesSettings:
    """What the configuration says; whether iptables can choose ports at random, and whether conntrack is
    liberal already, is for the caller to find out.
    """
    return IptablesSettings(
        masquerade_bit=config.iptables_masquerade_bit,
        tcp_be_liberal=config.conntrack_tcp_be_liberal,
    )
