"""The IPVS backend: the six methods, over virtual servers, kube-ipvs0, ipsets and rules."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, cast

from ebpfproxy.backends.generation import Generation
from ebpfproxy.backends.interface import Delta
from ebpfproxy.backends.ipvs import addresses, cleanup, schedulers, sysctls
from ebpfproxy.backends.ipvs.addresses import Addresses
from ebpfproxy.backends.ipvs.entries import Entry, Key, Local, Member, Server, ServerEntry, Set
from ebpfproxy.backends.ipvs.ip_sets import IpSets, make_all
from ebpfproxy.backends.ipvs.layout import LAYOUT
from ebpfproxy.backends.ipvs.node_entries import node_entries
from ebpfproxy.backends.ipvs.node_port_expansion import Product
from ebpfproxy.backends.ipvs.ownership import ownership
from ebpfproxy.backends.ipvs.servers import Servers
from ebpfproxy.backends.ipvs.service_entries import service_entries
from ebpfproxy.backends.ipvs.sets import NAMES, SETS, Order
from ebpfproxy.backends.ipvs.settings import IpvsSettings
from ebpfproxy.backends.netfilter.sysctls import SETTING_FAILED
from ebpfproxy.backends.xtables import entries as xtables
from ebpfproxy.backends.xtables import tool_backends
from ebpfproxy.backends.xtables.entries import FILTER, MANGLE, NAT
from ebpfproxy.backends.xtables.families import TwoFamilies
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.ipset import ipset
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.ipvs.ipvs import Timeouts
from ebpfproxy.linux.netlink import dummy, local_addresses
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.log import Logger
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan

log = Logger(__name__)

_FEW = 2000
"""Real servers that are looked at in a few milliseconds."""


class IpvsBackend:
    """See `Backend` for the contract. It acts in the calling thread's network namespace.

    What kube-proxy left is taken over as it is, and brought in step by the first sync. Virtual servers of
    others are neither read nor changed: see `ownership`. A family that this machine has no iptables for is
    left out.
    """

    name = "ipvs"

    def __init__(self, settings: IpvsSettings, tool_backend: str = tool_backends.AUTO) -> None:
        """`tool_backend`: see `tool_backends.choose`."""
        self._settings = settings
        self._wanted = tool_backend
        self._families = TwoFamilies(LAYOUT, (FILTER, NAT, MANGLE), cleanup.leftovers, make_all)
        self._generation = Generation(self._look)
        self._forget()

    def open(self) -> None:
        """Sysctls and IPVS' timeouts are set; of what serves, nothing is written but by `TwoFamilies.open`.

        Raises Unsupported where the kernel lacks IPVS, ipset, the scheduler or a sysctl that is needed, or no
        family can be served.
        """
        self.close()
        schedulers.check(self._settings.scheduler)
        ipset.available()
        ipvs.available()
        sysctls.apply(self._settings.strict_arp)
        self._set_timeouts()
        tools = self._families.open(self._wanted)
        self._random_fully = all(tool.has_random_fully() for tool in tools)
        self._forget()

    def _set_timeouts(self) -> None:
        """What is too long for the kernel depends on its HZ; as with kube-proxy it serves all the same."""
        settings = self._settings
        timeouts = Timeouts(settings.tcp_timeout, settings.tcp_fin_timeout, settings.udp_timeout)
        try:
            if any(timeouts):
                ipvs.set_timeouts(timeouts)
        except Rejected as failure:
            hint = "give shorter ones: --ipvs-tcp-timeout, --ipvs-tcpfin-timeout, --ipvs-udp-timeout"
            log.warning(SETTING_FAILED, reason=failure.message, hint=hint)

    def _forget(self) -> None:
        self._sets = IpSets()
        self._addresses = Addresses(self._sets)
        self._servers = Servers()
        self._product = Product()

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        served = self._families.served
        entries: dict[Key, Entry] = {}
        if node is not None:
            for family in served:
                entries.update(node_entries(node, family, self._settings, self._random_fully))
        for plan in plans:
            if plan.family in served:
                entries.update(service_entries(plan, self._settings))
        return entries

    def read(self) -> dict[Key, Entry]:
        self._generation.reading()
        served = self._families.served
        in_sets = self._sets.read(served)
        owned = ownership(
            in_sets, addresses.on_device(), local_addresses.read(), self._settings.exclude_cidrs
        )
        servers = self._servers.read(owned.is_own)
        found: dict[Key, Entry] = {**self._addresses.read(in_sets, served)}
        found.update((key, entry) for key, entry in servers.items() if key.family in served)
        return self._product.collapsed(found) | self._families.read()

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """Sets (see `Order`) and virtual servers first, then addresses, then all rules in one go, and what is
        not wanted any more in the opposite order. So no packet comes to an address before there is what it
        leads to, and while another mode serves, it does until the rules are in force.
        """
        with self._generation.own_change():
            return self._apply(delta)

    def _apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        kernel = self._product.expanded(_part(delta, (Set, Member, Server, Local)))
        puts, drops = kernel.puts, kernel.drops
        servers = cast(dict[Server, ServerEntry], {k: e for k, e in puts.items() if isinstance(k, Server)})
        rejected: list[Mapping[Any, KernelError]] = [
            self._sets.create(k for k in puts if isinstance(k, Set)),
            self._sets.change(_members(puts, Order.FIRST), _members(drops, Order.LAST)),
            self._sets.change(_members(puts, Order.SECOND), ()),
            self._servers.put(servers),
            self._sets.change(_members(puts, Order.LAST), ()),
            self._addresses.put(k for k in puts if isinstance(k, Local)),
            self._families.apply(_rules(delta)),
            self._addresses.drop(k for k in drops if isinstance(k, Local)),
            self._servers.drop(k for k in drops if isinstance(k, Server)),
            self._sets.change((), _members(drops, Order.SECOND)),
            self._sets.change((), _members(drops, Order.FIRST)),
            self._sets.destroy(k for k in drops if isinstance(k, Set)),
        ]
        self._servers.let_go()
        return {self._product.asked_for(key): why for each in rejected for key, why in each.items()}

    def generation(self) -> Hashable:
        return self._generation.value()

    def _look(self) -> Hashable:
        """Of sets it notices how many members they have. Of very many real servers nothing, and of kube-ipvs0
        whether it is there; of fewer all but flags of virtual servers, all its addresses, and which of these
        another device has."""
        few = self._servers.reals <= _FEW
        return (
            self._families.generation(),
            tuple(sorted(self._sets.generation().items())),
            (addresses.on_device(), self._addresses.shared()) if few else dummy.exists(KUBE_IPVS0),
            ipvs.fingerprint() if few else b"",
        )

    def close(self) -> None:
        self._families.close()


def _part(delta: Delta[Key, Entry], kinds: tuple[type, ...]) -> Delta[Key, Entry]:
    puts = {key: entry for key, entry in delta.puts.items() if isinstance(key, kinds)}
    return Delta(puts, frozenset(key for key in delta.drops if isinstance(key, kinds)))


def _members(keys: Iterable[Key], order: Order) -> list[Member]:
    members = (key for key in keys if isinstance(key, Member))
    return [key for key in members if SETS[NAMES[key.set][0]].order is order]


def _rules(delta: Delta[Key, Entry]) -> Delta[xtables.Key, xtables.Entry]:
    rules = _part(delta, (xtables.Chain, xtables.SharedChain, xtables.Rule))
    return cast(Delta[xtables.Key, xtables.Entry], rules)
