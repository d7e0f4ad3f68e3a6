"""The definition of mode iptables."""

import re
from collections.abc import Callable, Iterable, Iterator

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.iptables import cleanup, probes
from ebpfproxy.backends.iptables.backend import IptablesBackend
from ebpfproxy.backends.iptables.node_rules import LOOPBACK_GUARD
from ebpfproxy.backends.iptables.settings import IptablesSettings
from ebpfproxy.backends.mode import BackendInspection, Callbacks, Inspection, Parts
from ebpfproxy.backends.netfilter import families_used
from ebpfproxy.backends.netfilter.sync_hooks import NetfilterHooks, netfilter_settings
from ebpfproxy.backends.netfilter.sysctls import answers_on_loopback
from ebpfproxy.backends.netfilter.tracked_protocols import sctp_is_unserved
from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.entries import Key, Rule
from ebpfproxy.config import Config
from ebpfproxy.config.derived import plan_context
from ebpfproxy.model.address import Family, Protocol, parse_address, unspecified
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.balancing import Support
from ebpfproxy.plan.service_plan import Frontend


class IptablesMode:
    """Implements `Mode`."""

    name = "iptables"
    uses_kernel_nat = True
    balancing = Support(frozenset({Algorithm.RANDOM}))

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return probes.probe(config.iptables_backend, families_used.used(config))

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return ()

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        backend = IptablesBackend(iptables_settings(config), config.iptables_backend)
        settings = netfilter_settings(config, self.name)
        sync_hooks = NetfilterHooks(settings, callbacks, frontends, LOOPBACK_GUARD)
        context = plan_context(config, self.name, sctp_is_unserved())
        return Parts(backend, context, sync_counts=backend.all_counts, sync_hooks=sync_hooks)

    def inspect(self, config: Config) -> Inspection:
        backend = IptablesBackend(iptables_settings(config), config.iptables_backend)
        backend.open_to_read()
        return BackendInspection(backend, plan_context(config, self.name, sctp_is_unserved()))

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        return [] if beside_kube_proxy else cleanup.remove(dry_run)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return cleanup.drain(translates)


def iptables_settings(config: Config) -> IptablesSettings:
    """Return the settings in the configuration.

    The backend detects whether iptables supports random source ports, whether nf_conntrack_tcp_be_liberal is
    on, and whether packets can be counted. Raises ConfigError if the node has no name.
    """
    return IptablesSettings(
        masquerade_bit=config.iptables_masquerade_bit,
        tcp_be_liberal=config.conntrack_tcp_be_liberal,
        localhost_node_ports=answers_on_loopback(plan_context(config, IptablesMode.name)),
    )


_CHAINS = {names.SERVICES, names.EXTERNAL_SERVICES, names.NODE_PORTS}
_DESTINATION = re.compile(
    r"(?:-d (?P<address>[0-9a-f.:]+)/\d+ )?-p (?P<protocol>\w+) .*--dport (?P<port>\d+) -j "
)


def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
    """Yield the frontends that rules in shared chains translate, reject or drop.

    >>> from ebpfproxy.model.address import Family
    >>> texts = ("-d 10.96.0.1/32 -p udp -m udp --dport 53 -j A", "-p udp -m udp --dport 30053 -j A", "-j A")
    >>> [str(each) for each in frontends(Rule(Family.IPV4, "nat", names.SERVICES, text) for text in texts)]
    ['10.96.0.1:53/UDP', '0.0.0.0:30053/UDP']
    """
    for key in keys:
        if isinstance(key, Rule) and key.chain in _CHAINS:
            match = _DESTINATION.match(key.text)
            protocol = Protocol.__members__.get(match["protocol"].upper()) if match else None
            if match and protocol:
                address = match["address"]
                destination = parse_address(address) if address else unspecified(key.family)
                yield Frontend(destination, int(match["port"]), protocol)
