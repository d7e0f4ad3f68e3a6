"""The IPVS backend: virtual servers, addresses on kube-ipvs0, ipsets and rules."""

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, cast

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.difference import Difference
from ebpfproxy.backends.generation import Generation
from ebpfproxy.backends.iptables import entries as iptables
from ebpfproxy.backends.iptables import probes
from ebpfproxy.backends.iptables.entries import FILTER, MANGLE, NAT
from ebpfproxy.backends.iptables.families import TwoFamilies
from ebpfproxy.backends.ipvs import addresses, cleanup, prerequisites, return_path
from ebpfproxy.backends.ipvs.addresses import Addresses
from ebpfproxy.backends.ipvs.endpoint_networks import EndpointNetworks
from ebpfproxy.backends.ipvs.entries import (
    LAYOUT,
    Entry,
    IpvsSettings,
    Key,
    Local,
    Member,
    PodAddress,
    ReturnPath,
    Server,
    ServerEntry,
    Set,
    Tunnel,
)
from ebpfproxy.backends.ipvs.forwarding import KernelSurroundings, Surroundings, requested
from ebpfproxy.backends.ipvs.node_entries import node_entries
from ebpfproxy.backends.ipvs.node_port_expansion import NodePortExpansion
from ebpfproxy.backends.ipvs.servers import Servers
from ebpfproxy.backends.ipvs.service_entries import limits, service_entries
from ebpfproxy.backends.ipvs.sets import NAMES, SETS, IpSets, Order, create_all, ownership
from ebpfproxy.backends.netfilter import sysctls
from ebpfproxy.backends.netfilter.nat_backend import NatBackend
from ebpfproxy.backends.netfilter.sysctls import SETTING_FAILED
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux import ipset
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.ipvs.ipvs import Timeouts
from ebpfproxy.linux.netlink import dummy, local_addresses
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.linux.xtables.iptables import Iptables
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family
from ebpfproxy.model.balancing import Forwarding
from ebpfproxy.model.counters import IptablesCounts, Report
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.service_plan import Frontend, NodePlan, PlanKey, ServicePortPlan

log = Logger(__name__)

LIMITED = "Service cannot get the load balancing that it requests"
"""`instead` names what it gets, and why. Other Services are not affected."""

_FEW = 2000
"""Up to this number, all real servers can be read in a few milliseconds."""

_Rendered = tuple[dict[Key, Entry], set[str]]
"""The entries of a plan, and what it requests and does not get."""

_BUSY_FACTOR = 100.0  # the pause after a search in the namespaces of endpoints, in times of its duration


class IpvsBackend(NatBackend[Key, Entry]):
    """Virtual servers in the calling thread's network namespace.

    The objects of kube-proxy are taken over, and the first sync brings them in sync. Virtual servers of other
    programs are neither read nor changed: see `ownership`. If this machine has no iptables tool for a family,
    that family is not served.
    """

    name = "ipvs"
    reread_seconds = 0.0  # IPVS reports no changes

    def __init__(
        self,
        settings: IpvsSettings,
        tool_backend: str = probes.AUTO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tool_backend`: see `probes.choose`."""
        self._clock = clock
        self._release_at = float("-inf")
        self._settings = settings
        self._wanted = tool_backend
        self._families = TwoFamilies(LAYOUT, (FILTER, NAT, MANGLE), cleanup.leftovers, create_all)
        self._generation = Generation(self._observe)
        self._reset()

    def open(self) -> None:
        """Set sysctls and the timeouts of IPVS. Nothing else is written, except by `TwoFamilies.open`.

        Raises Unsupported if the kernel lacks IPVS, ipset, the scheduler or a required sysctl, or if no
        family can be served.
        """
        self.close()
        prerequisites.check_scheduler(self._settings.scheduler)
        ipset.available()
        ipvs.available()
        sysctls.apply(prerequisites.desired_sysctls(self._settings.strict_arp))
        self._set_timeouts()
        self._set_up(self._families.open(self._wanted))

    def open_to_read(self) -> None:
        """Like `open`, but only for `render` and `read`. Nothing is written, and no module is loaded."""
        self._set_up(self._families.open_to_read(self._wanted))

    def _set_up(self, tools: Iterable[Iptables]) -> None:
        self._reset()

    def _set_timeouts(self) -> None:
        """Set the timeouts of IPVS. The longest possible timeout depends on the HZ of the kernel. Like
        kube-proxy, the agent serves even if a timeout is too long.
        """
        settings = self._settings
        timeouts = Timeouts(settings.tcp_timeout, settings.tcp_fin_timeout, settings.udp_timeout)
        try:
            if any(timeouts):
                ipvs.set_timeouts(timeouts)
        except Rejected as failure:
            hint = "set shorter timeouts: --ipvs-tcp-timeout, --ipvs-tcpfin-timeout, --ipvs-udp-timeout"
            log.warning(SETTING_FAILED, reason=failure.message, hint=hint)

    def _reset(self) -> None:
        self._sets = IpSets()
        self._addresses = Addresses(self._sets)
        self._servers = Servers()
        self._expansion = NodePortExpansion()
        self._endpoints = EndpointNetworks()
        self._surroundings = KernelSurroundings()
        self._limits: dict[NamespacedName, dict[PlanKey, set[str]]] = {}
        self._dependent: dict[PlanKey, tuple[ServicePortPlan, _Rendered]] = {}  # on routes and addresses

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        served = self._families.served
        entries: dict[Key, Entry] = {}
        surroundings = self._surroundings.answers()
        if node is not None:
            self._surroundings.forget()  # since a local address has changed
            for family in served:
                entries.update(node_entries(node, family, self._settings))
        for plan in plans:
            if plan.family in served:
                rendered = self._rendered(plan, surroundings)
                entries.update(rendered[0])
                if not self._families.is_for_reading:
                    self._dependent.pop(plan.key, None)
                    if requested(plan, self._settings.forwarding) is not Forwarding.NAT:
                        self._dependent[plan.key] = plan, rendered
                    self._report_limits(plan, rendered[1])
        return entries

    def _rendered(self, plan: ServicePortPlan, surroundings: Surroundings) -> _Rendered:
        entries = service_entries(plan, self._settings, surroundings)
        return entries, limits(plan, self._settings, surroundings)

    def _report_limits(self, plan: ServicePortPlan, found: set[str]) -> None:
        """Log the limits of a Service once until they change. The first of its ports that has any counts."""
        name = NamespacedName(plan.name.namespace, plan.name.name)
        known = self._limits.get(name, {})
        previous = known.pop(plan.key, None)
        if found:
            if found != previous and (previous or not known):
                log.warning(LIMITED, service=str(name), instead="; ".join(sorted(found)))
            self._limits[name] = known | {plan.key: found}
        elif not known:
            self._limits.pop(name, None)

    def read(self) -> dict[Key, Entry]:
        if not self._families.is_for_reading:
            self._generation.reading()
        served = self._families.served
        in_sets = self._sets.read(served)
        owned = ownership(
            in_sets, addresses.on_device(), local_addresses.read(), self._settings.exclude_cidrs
        )
        servers = self._servers.read(owned.is_own)
        found: dict[Key, Entry] = {**self._addresses.read(in_sets, served)}
        found.update((key, entry) for key, entry in servers.items() if key.family in served)
        self._surroundings.forget()
        return self._expansion.collapse(found) | self._read_untranslated(served) | self._families.read()

    def _read_untranslated(self, served: Collection[Family]) -> dict[Key, Entry]:
        """Return what the node and its endpoints have for untranslated packets."""
        entries: dict[Key, Entry] = dict(self._endpoints.read(served).items())
        is_correct = return_path.read(self._endpoints.endpoints)
        return entries if is_correct is None else {**entries, ReturnPath(Family.IPV4): is_correct}

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """Write sets (see `Order`) and virtual servers, then addresses, then all rules at once. Remove
        objects in the reverse order.

        So no packet reaches an address before its virtual server exists. While another mode serves, it
        continues to do so until the rules are in force.
        """
        with self._generation.own_change():
            return self._apply(delta)

    def _apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        kernel = self._expansion.expand(_part(delta, (Set, Member, Server, Local)))
        puts, drops = kernel.puts, kernel.drops
        servers = cast(dict[Server, ServerEntry], {k: e for k, e in puts.items() if isinstance(k, Server)})
        rejected: list[Mapping[Any, KernelError]] = [
            self._sets.create(k for k in puts if isinstance(k, Set)),
            self._put_untranslated(delta.puts),
            self._sets.change(_members(puts, Order.FIRST), _members(drops, Order.LAST)),
            self._sets.change(_members(puts, Order.SECOND), ()),
            self._servers.put(servers),
            self._sets.change(_members(puts, Order.LAST), ()),
            self._addresses.put(k for k in puts if isinstance(k, Local)),
            self._families.apply(_rules(delta)),
            self._addresses.drop(k for k in drops if isinstance(k, Local)),
            self._servers.drop(k for k in drops if isinstance(k, Server)),
            self._drop_untranslated(delta.drops),
            self._sets.change((), _members(drops, Order.SECOND)),
            self._sets.change((), _members(drops, Order.FIRST)),
            self._sets.destroy(k for k in drops if isinstance(k, Set)),
        ]
        self._servers.delete_drained()
        return {self._expansion.entry_of(key): error for each in rejected for key, error in each.items()}

    def _put_untranslated(self, puts: Iterable[Key]) -> Mapping[Any, KernelError]:
        """Prepare this node and its endpoints before a virtual server sends them untranslated packets."""
        puts = list(puts)
        rejected: dict[Any, KernelError] = {}
        wanted = [key for key in puts if isinstance(key, PodAddress | Tunnel)]
        if wanted:
            rejected.update(self._endpoints.put(wanted))
        node = next((key for key in puts if isinstance(key, ReturnPath)), None)
        if node or any(key.family is Family.IPV4 for key in wanted):
            try:
                return_path.ensure(self._endpoints.endpoints)
            except KernelError as failure:
                rejected[node or wanted[0]] = failure
        return rejected

    def _drop_untranslated(self, drops: Iterable[Key]) -> Mapping[Any, KernelError]:
        drops = list(drops)
        rejected: dict[Any, KernelError] = {}
        unwanted = [key for key in drops if isinstance(key, PodAddress | Tunnel)]
        if unwanted:
            rejected.update(self._endpoints.drop(unwanted))
        for key in drops:
            if isinstance(key, ReturnPath):
                try:
                    return_path.restore()
                except KernelError as failure:
                    rejected[key] = failure
        return rejected

    def maintain(self) -> None:
        """Remove what endpoints kept for connections that have ended. Cheap if they kept nothing.

        Listing the sockets of a pod that has many takes long. So the next call that does it comes the later.
        """
        began = self._clock()
        if began >= self._release_at:
            self._endpoints.release()
            ended = self._clock()
            self._release_at = ended + _BUSY_FACTOR * (ended - began)

    def outdated(self, plans: Collection[PlanKey]) -> list[PlanKey]:
        """Return those of `plans`, all current ones, that would be rendered differently now, since routes or
        local addresses have changed. They are compared once after each read, and after a change of the node.
        """
        if not self._surroundings.may_differ:
            return []
        self._surroundings.may_differ = False
        now = self._surroundings.answers()
        self._forget_all_but(plans)
        return [key for key, (plan, was) in self._dependent.items() if self._rendered(plan, now) != was]

    def _forget_all_but(self, plans: Collection[PlanKey]) -> None:
        self._dependent = {key: each for key, each in self._dependent.items() if key in plans}
        for name, known in list(self._limits.items()):
            self._limits[name] = {key: found for key, found in known.items() if key in plans}
            if not self._limits[name]:
                del self._limits[name]

    def generation(self) -> Hashable:
        return self._generation.value()

    def _observe(self) -> Hashable:
        """Return a value that differs after changes.

        - Sets: only the number of members is observed.
        - Up to _FEW real servers: everything but the flags of virtual servers, and the addresses on
          kube-ipvs0 and which of them another device has.
        - More real servers: only whether kube-ipvs0 exists.
        """
        few = self._servers.reals <= _FEW
        return (
            self._families.generation(),
            tuple(sorted(self._sets.generation().items())),
            (addresses.on_device(), self._addresses.shared()) if few else dummy.exists(KUBE_IPVS0),
            ipvs.fingerprint() if few else b"",
        )

    def report(self) -> Report:
        """Include the counts that kube-proxy has in this mode: of restores, for each family."""
        restores = (
            IptablesCounts(each.family, each.restore_failures, partial_failures=None)
            for each in self._families.counts()
        )
        return Report(syncs=tuple(restores))

    def further(self) -> list[Difference]:
        return prerequisites.differing_sysctls(self._settings.strict_arp)

    @staticmethod
    def frontends(keys: Iterable[Key]) -> Iterator[Frontend]:
        """Return the frontends that IPVS translates.

        >>> from ebpfproxy.backends.ipvs.entries import Local
        >>> from ebpfproxy.model.address import Family, Protocol, parse_address
        >>> address = parse_address("10.96.0.1")
        >>> dns = Server(Family.IPV4, Frontend(address, 53, Protocol.UDP))
        >>> [str(each) for each in IpvsBackend.frontends([dns, Local(Family.IPV4, address)])]
        ['10.96.0.1:53/UDP']
        """
        return (key.frontend for key in keys if isinstance(key, Server))

    def close(self) -> None:
        self._families.close()
        super().close()


def _part(delta: Delta[Key, Entry], kinds: tuple[type, ...]) -> Delta[Key, Entry]:
    puts = {key: entry for key, entry in delta.puts.items() if isinstance(key, kinds)}
    return Delta(puts, frozenset(key for key in delta.drops if isinstance(key, kinds)))


def _members(keys: Iterable[Key], order: Order) -> list[Member]:
    members = (key for key in keys if isinstance(key, Member))
    return [key for key in members if SETS[NAMES[key.set][0]].order is order]


def _rules(delta: Delta[Key, Entry]) -> Delta[iptables.Key, iptables.Entry]:
    rules = _part(delta, (iptables.Chain, iptables.SharedChain, iptables.Rule))
    return cast(Delta[iptables.Key, iptables.Entry], rules)
