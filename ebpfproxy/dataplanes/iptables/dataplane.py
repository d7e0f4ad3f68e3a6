"""The iptables dataplane: kube-proxy's chains and rules, by the tools of either flavour."""

import contextlib
import dataclasses
from collections.abc import Hashable, Iterable, Mapping

from ebpfproxy.dataplanes.interface import Delta
from ebpfproxy.dataplanes.iptables import flavours, removal
from ebpfproxy.dataplanes.iptables.entries import FILTER, MANGLE, NAT, Entry, Key, chain_key
from ebpfproxy.dataplanes.iptables.node_rules import node_entries
from ebpfproxy.dataplanes.iptables.service_rules import service_entries
from ebpfproxy.dataplanes.iptables.settings import IptablesSettings
from ebpfproxy.dataplanes.iptables.tables import Tables
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.kernel import iptables, sysctl, xtables_legacy
from ebpfproxy.kernel.iptables import Flavour, Iptables
from ebpfproxy.kernel.xtables_nft import Changes
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan, ServicePortPlan

log = Logger(__name__)

_LIBERAL = "net/netfilter/nf_conntrack_tcp_be_liberal"
_TABLES = (FILTER, NAT, MANGLE)


class IptablesDataplane:
    """See `Dataplane` for the contract. It acts in the calling thread's network namespace.

    A family that this machine has no iptables for is left out: its plans render to nothing.
    """

    name = "iptables"

    def __init__(self, settings: IptablesSettings, flavour: str = flavours.AUTO) -> None:
        """`flavour`: see `flavours.choose`."""
        self._settings = settings
        self._wanted = flavour
        self._tables: dict[Family, Tables] = {}  # empty: not open
        self._changes: Changes | None = None
        self._settled = False

    def open(self) -> None:
        """Nothing is written but, with the flavour legacy, the tables filter and nat where they were not in
        use, without a rule.

        Raises Unsupported where no family can be served.
        """
        self.close()
        self._flavour = flavours.choose(self._wanted)
        tools = [tool for tool in map(self._usable, Family) if tool]
        if not tools:
            raise Unsupported(
                f"iptables of the flavour {self._flavour} serves no family here",
                "ebpfproxy doctor shows what is missing",
            )
        if self._flavour is Flavour.NFT:
            self._changes = Changes(frozenset(_TABLES), _concerns_us)
        liberal = self._settings.tcp_be_liberal
        with contextlib.suppress(KernelError):
            liberal = liberal or sysctl.read(_LIBERAL) != "0"
        self._told = dataclasses.replace(
            self._settings,
            random_fully=self._settings.random_fully and all(tool.has_random_fully() for tool in tools),
            tcp_be_liberal=liberal,
        )
        self._tables = {tool.family: Tables(tool) for tool in tools}
        self._settled = False
        log.info("using iptables", flavour=self._flavour, version=tools[0].version)

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        entries: dict[Key, Entry] = {}
        if node is not None:
            for family in self._tables:
                entries.update(node_entries(node, family, self._told))
        for plan in plans:
            if plan.family in self._tables:
                entries.update(service_entries(plan, self._told))
        return entries

    def read(self) -> dict[Key, Entry]:
        found: dict[Key, Entry] = {}
        for tables in self._tables.values():
            found.update(tables.read())
        return found

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """One family after the other, each by one run of iptables-restore.

        The first time that all is in force, what is left of the other flavour goes: both would translate.
        """
        refused: dict[Key, KernelError] = {}
        for family, tables in self._tables.items():
            refused.update(tables.apply(_of_family(delta, family)))
        if not self._settled and not refused:
            self._settled = True
            self._settle()
        return refused

    def _settle(self) -> None:
        for flavour in Flavour:
            if flavour is not self._flavour:
                try:
                    removed = removal.remove_of(flavour)
                except KernelError as failure:
                    log.warning("rules of another flavour stay", flavour=flavour, reason=failure.message)
                else:
                    for line in removed:
                        log.info("removed what another flavour had", what=line)

    def generation(self) -> Hashable:
        """With the flavour legacy it does not notice a change that leaves the number and the sizes of all
        rules as they were, such as another address in a rule."""
        if self._changes:
            return self._changes.count()
        return tuple(
            xtables_legacy.fingerprint(family, table) for family in self._tables for table in _TABLES
        )

    def close(self) -> None:
        self._tables = {}
        if self._changes:
            self._changes.close()
            self._changes = None

    def _usable(self, family: Family) -> Iptables | None:
        try:
            tool = iptables.find(family, self._flavour)
            # Of iptables-legacy only what is not in use yet: all else would be copied, and may be large.
            known = xtables_legacy.tables(family) if self._flavour is Flavour.LEGACY else frozenset()
            tool.restore("".join(f"*{table}\nCOMMIT\n" for table in (FILTER, NAT) if table not in known))
        except Unsupported as lack:
            log.warning("a family is not served", family=family.value, reason=lack.message, hint=lack.hint)
            return None
        return tool


def _of_family(delta: Delta[Key, Entry], family: Family) -> Delta[Key, Entry]:
    puts = {key: entry for key, entry in delta.puts.items() if key.family is family}
    return Delta(puts, frozenset(key for key in delta.drops if key.family is family))


def _concerns_us(table: str, chain: str) -> bool:
    return chain_key(Family.IPV4, table, chain) is not None
