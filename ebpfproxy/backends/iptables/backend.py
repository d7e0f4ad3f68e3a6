"""The iptables backend: kube-proxy's chains and rules, written by the tools of one iptables backend."""

import contextlib
import dataclasses
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.interface import HOUR
from ebpfproxy.backends.iptables import chains, cleanup, packet_counters, probes
from ebpfproxy.backends.iptables.chains import LAYOUT
from ebpfproxy.backends.iptables.entries import FILTER, MANGLE, NAT, Entry, Key, Rule
from ebpfproxy.backends.iptables.families import TwoFamilies
from ebpfproxy.backends.iptables.rules import LOOPBACK_GUARD, IptablesSettings, node_entries
from ebpfproxy.backends.iptables.service_rules import service_entries
from ebpfproxy.backends.netfilter.nat_backend import NatBackend
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.xtables.iptables import Iptables
from ebpfproxy.model.address import Protocol, parse_address, unspecified
from ebpfproxy.model.counters import IptablesCounts, Report
from ebpfproxy.plan.service_plan import Frontend, NodePlan, ServicePortPlan

_TCP_BE_LIBERAL = "net/netfilter/nf_conntrack_tcp_be_liberal"

_CHAINS = {chains.SERVICES, chains.EXTERNAL_SERVICES, chains.NODE_PORTS}
_DESTINATION = re.compile(
    r"(?:-d (?P<address>[0-9a-f.:]+)/\d+ )?-p (?P<protocol>\w+) .*--dport (?P<port>\d+) -j "
)


class IptablesBackend(NatBackend[Key, Entry]):
    """Rules in the calling thread's network namespace.

    If this machine has no iptables tool for a family, that family is not served: its plans render to nothing.
    """

    name = "iptables"
    reread_seconds = HOUR
    loopback_guard = LOOPBACK_GUARD

    def __init__(self, settings: IptablesSettings, tool_backend: str = probes.AUTO) -> None:
        """`tool_backend`: see `probes.choose`."""
        self._settings = settings
        self._wanted = tool_backend
        self._families = TwoFamilies(
            LAYOUT, (FILTER, NAT, MANGLE), cleanup.leftovers, packet_counters.prepare
        )

    def open(self) -> None:
        """See `TwoFamilies.open`."""
        self._set_up(self._families.open(self._wanted))

    def open_to_read(self) -> None:
        """Like `open`, but only for `render` and `read`. Nothing is written."""
        self._set_up(self._families.open_to_read(self._wanted))

    def _set_up(self, tools: Sequence[Iptables]) -> None:
        liberal = self._settings.tcp_be_liberal
        with contextlib.suppress(KernelError):
            liberal = liberal or sysctl.read(_TCP_BE_LIBERAL) != "0"
        self._effective_settings = dataclasses.replace(
            self._settings,
            tcp_be_liberal=liberal,
            counts_packets=self._counts_packets(tools),
        )

    def _counts_packets(self, tools: Sequence[Iptables]) -> bool:
        """Return whether rules count packets. To read is to ask whether the agent's rules do: if it could not
        try them, for lack of CAP_SYS_ADMIN, it did not create the counters either.
        """
        if self._families.is_for_reading and not packet_counters.exist():
            return False
        return all(probes.accepts(tool, probes.PACKET_COUNTERS, packet_counters.prepare) for tool in tools)

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        served = self._families.served
        entries: dict[Key, Entry] = {}
        if node is not None:
            for family in served:
                entries.update(node_entries(node, family, self._effective_settings))
        for plan in plans:
            if plan.family in served:
                entries.update(service_entries(plan, self._effective_settings.counts_localhost))
        return entries

    def read(self) -> dict[Key, Entry]:
        return self._families.read()

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """See `TwoFamilies.apply`. The counters exist before the rules that count with them."""
        if self._effective_settings.counts_packets and delta.puts:
            packet_counters.create()
        return self._families.apply(delta)

    def generation(self) -> Hashable:
        """See `TwoFamilies.generation`."""
        return self._families.generation()

    def counts(self) -> tuple[IptablesCounts, ...]:
        """Return the counts of each family. Any thread may call it."""
        return self._families.counts()

    def report(self) -> Report:
        """Include the counts of packets, if rules count them. Only in the network namespace. Raises
        KernelError.
        """
        packets = (packet_counters.read(),) if self._effective_settings.counts_packets else ()
        return Report(syncs=(*self.counts(), *packets))

    def close(self) -> None:
        self._families.close()
        super().close()

    @staticmethod
    def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
        """Yield the frontends that rules in shared chains translate, reject or drop.

        >>> from ebpfproxy.model.address import Family
        >>> here = "-d 10.96.0.1/32 -p udp -m udp --dport 53 -j A"
        >>> texts = (here, "-p udp -m udp --dport 30053 -j A", "-j A")
        >>> rules = (Rule(Family.IPV4, "nat", chains.SERVICES, text) for text in texts)
        >>> [str(each) for each in IptablesBackend.frontends(rules)]
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
