"""The definition of mode iptables."""

from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.backends.iptables import cleanup, probes
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.rules import IptablesSettings
from ebpfproxy.backends.netfilter.node_support import families_used
from ebpfproxy.backends.netfilter.sysctls import answers_on_loopback
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.model.address import Family
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.balancing import Support


class IptablesMode(Mode):
    name = "iptables"
    uses_kernel_nat = True
    balancing = Support(frozenset({Algorithm.RANDOM}), resets=True)

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(config.iptables_backend, families_used(config))

    def serve(self, config: Config, callbacks: Callbacks) -> IptablesBackend:
        return _backend(config).serves(config, callbacks)

    def inspect(self, config: Config) -> IptablesBackend:
        backend = _backend(config).reads(config)
        backend.open_to_read()
        return backend

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        return [] if beside_kube_proxy else cleanup.remove(dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.drain(translates)


def iptables_settings(config: Config) -> IptablesSettings:
    """Return the settings in the configuration.

    The backend detects whether nf_conntrack_tcp_be_liberal is on, and whether packets can be counted. Raises
    ConfigError if the node has no name.
    """
    return IptablesSettings(
        masquerade_bit=config.iptables_masquerade_bit,
        tcp_be_liberal=config.conntrack_tcp_be_liberal,
        localhost_node_ports=answers_on_loopback(plan_context(config, IptablesMode.name)),
    )


def _backend(config: Config) -> IptablesBackend:
    return IptablesBackend(iptables_settings(config), config.iptables_backend)
