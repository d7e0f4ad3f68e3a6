"""The definition of mode nftables."""

import dataclasses
from collections.abc import Callable

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.backends.netfilter.node_support import families_used
from ebpfproxy.backends.nftables import cleanup, flowtables, probes
from ebpfproxy.backends.nftables.backend import NftablesBackend
from ebpfproxy.backends.nftables.inspection import NftablesInspection
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.backends.nftables.shares import DRAWS
from ebpfproxy.backends.userspace.settings import userspace_settings
from ebpfproxy.config import Config
from ebpfproxy.config.derived import flowtable_patterns, plan_context
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family, Network, loopback, network_family
from ebpfproxy.plan.balancing import Support
from ebpfproxy.plan.node_ports import plan_node_ports

log = Logger(__name__)

WITHOUT_FLOWTABLE = "Established flows are not forwarded by a flowtable"
"""--nftables-flowtable-devices has no effect, for a `reason` that `ebpfproxy doctor` shows, too. All packets
pass the rules, as without the flag."""


class NftablesMode(Mode):
    name = "nftables"
    uses_kernel_nat = True
    balancing = Support(frozenset(DRAWS), weights=True, resets=True)

    def probe(self, config: Config) -> tuple[Finding, ...]:
        found = probes.probe(families_used(config))
        return (*found, flowtables.probe()) if flowtable_patterns(config) else found

    def serve(self, config: Config, callbacks: Callbacks) -> NftablesBackend:
        settings = nftables_settings(config)
        if flowtable_patterns(config) and not settings.flowtable:
            lack = flowtables.probe()
            log.warning(WITHOUT_FLOWTABLE, reason=lack.missing, hint=lack.remedy)
        return NftablesBackend(settings).serves(config, callbacks)

    def inspect(self, config: Config) -> NftablesInspection:
        inspection = NftablesInspection(nftables_settings(config)).reads(config)
        inspection.open()
        return inspection

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        return (cleanup.remove_beside_kube_proxy if beside_kube_proxy else cleanup.remove)(dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.drain(translates)


def nftables_settings(config: Config) -> NftablesSettings:
    """Return the settings. Raises ConfigError if the node has no name."""
    loopbacks = frozenset(Network(loopback(each), 128) for each in Family)
    accepting = plan_node_ports(loopbacks, None, plan_context(config, NftablesMode.name))
    return NftablesSettings(
        masquerade_bit=config.iptables_masquerade_bit,
        flowtable=bool(flowtable_patterns(config)) and flowtables.probe().present,
        localhost=frozenset(map(network_family, accepting)),
        relay=dataclasses.replace(userspace_settings(config), relays=1),  # others would take memory
    )
