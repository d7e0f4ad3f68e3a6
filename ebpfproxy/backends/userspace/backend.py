"""The userspace backend: relay processes, and the addresses of Services."""

import errno
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.generation import Generation
from ebpfproxy.backends.interface import Backend
from ebpfproxy.backends.userspace import addresses
from ebpfproxy.backends.userspace.entries import Entry, Key, Listen, Local, UserspaceSettings
from ebpfproxy.backends.userspace.messages import Failure
from ebpfproxy.backends.userspace.redirects import Redirects, State, in_force, state_of
from ebpfproxy.backends.userspace.relays import Relays, rejection
from ebpfproxy.backends.userspace.rendering import render
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import capabilities
from ebpfproxy.linux.netlink import local_routes
from ebpfproxy.log import Logger
from ebpfproxy.model.counters import Report, TableUse
from ebpfproxy.plan.service_plan import Frontend, NodePlan, ServicePortPlan

log = Logger(__name__)

NO_ADDRESSES = "Cannot add addresses, serving only those that this node has"
"""The agent has no CAP_NET_ADMIN. NodePorts work, and external IPs that are addresses of this node. Other
addresses of Services do not, unless another program makes them local."""
NO_REDIRECTS = "Cannot redirect to relays, they occupy the ports of Services"
"""nftables is missing. A program of the node, such as an ingress controller with `hostNetwork`, cannot listen
at all addresses at a port that a Service has, and a relay cannot listen at a port at which such a program
does."""


class UserspaceBackend(Backend[Key, Entry]):
    """Relays and redirects in the calling thread's network namespace.

    Addresses that a previous run left are taken over. Its relays ended with it.
    """

    name = "userspace"
    reread_seconds = 0.0  # the kernel does not report that a listening socket was destroyed
    binds_sockets = True
    ends_with_agent = True

    def __init__(
        self, settings: UserspaceSettings | None = None, changed: Callable[[], object] = lambda: None
    ) -> None:
        """`changed` is called after a relay was replaced."""
        self._settings = settings or UserspaceSettings()
        self.relays = Relays(self._settings, changed)
        self._redirects = Redirects()
        self._generation = Generation(local_routes.read)
        self._sets_addresses = True
        # Listeners that the last change could not open at each of their addresses. The caller puts them again
        # as long as it wants them, but does not drop them, since they do not count as in force.
        self._rejected: AbstractSet[Key] = frozenset()
        self._attempts = 0

    def open(self) -> None:
        """Start the relays. Nothing is written to the kernel. Raises KernelError; no relay runs then."""
        self._sets_addresses = capabilities.NET_ADMIN in capabilities.capabilities()
        if not self._sets_addresses:
            log.warning(NO_ADDRESSES, hint="run as root, or with CAP_NET_ADMIN")
        else:
            reason = self._redirects.open()
            if reason:
                log.warning(NO_REDIRECTS, reason=reason.message, hint=reason.hint)
        try:
            self.relays.open()
        except BaseException:
            self._redirects.close()
            raise

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        entries = render(plans, node, self._redirects.families)
        if self._sets_addresses:
            return entries
        return {key: entry for key, entry in entries.items() if not isinstance(key, Local)}

    def read(self) -> dict[Key, Entry]:
        self._generation.reading()
        redirects = self._redirects.read()
        entries = in_force(self.relays.read(), redirects, self._redirects.families, self._rejected)
        entries.update(addresses.read())
        return entries

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """Change the relays, then the redirects, then the addresses. They are removed in the opposite order.

        So a packet to an address of a Service that is new or removed meets no other listener.
        """
        local = {key for key in (*delta.puts, *delta.drops) if isinstance(key, Local)}
        of_relays = {key: entry for key, entry in delta.puts.items() if not isinstance(entry, bool)}
        # A frontend without endpoints has no listener.
        states: dict[Frontend, State | None] = {
            key.frontend: None for key in delta.drops if isinstance(key, Listen)
        }
        dropped: list[Key] = [*(delta.drops - local), *(self._rejected - delta.puts.keys())]
        for key in delta.puts.keys() - of_relays.keys() - local:
            assert isinstance(key, Listen)
            states[key.frontend] = State.REJECTED
            dropped.append(key)
        changed = {key.address for key in local}
        with self._generation.own_change(is_own=lambda before, after: before ^ after <= changed):
            rejected: dict[Key, KernelError] = {**addresses.change((), local & delta.drops)}
            self._redirects.change(states)
            if of_relays or dropped:
                failures = self.relays.apply(of_relays, dropped)
                rejected |= {key: rejection(failure) for key, failure in failures.items()}
                self._rejected = failures.keys() & delta.puts.keys()
                self._redirects.change(self._with_listener(of_relays, failures))
            rejected.update(addresses.change(local & delta.puts.keys(), ()))
        return rejected

    def _with_listener(
        self, puts: Mapping[Key, Entry], failures: Mapping[Listen, Failure]
    ) -> dict[Frontend, State | None]:
        """Return the states of listeners that are put. If one could not be changed, its frontend keeps its
        state, unless another program has the port.
        """
        states: dict[Frontend, State | None] = {}
        for key, entry in puts.items():
            if not isinstance(key, Listen):
                continue
            state, failure = state_of(key, entry), failures.get(key)
            if failure and state is State.RELAYED:
                former = self._redirects.state(key.frontend)
                state = State.REJECTED if failure.number == errno.EADDRINUSE else former or State.REJECTED
            states[key.frontend] = state
        return states

    def generation(self) -> Hashable:
        """Also return another value each time while a port is in use by others: it may be free now."""
        self._attempts += bool(self._rejected)
        redirects = self._redirects.generation()
        return self.relays.replaced, self._attempts, redirects, self._generation.value()

    def is_notified(self) -> bool:
        return True

    def report(self) -> Report:
        """Include the open UDP flows and their largest number, what the relays counted since they started,
        and the open connections.
        """
        counted = self.relays.counters()
        flows = TableUse(counted.udp_flows, self._settings.udp_flows * self._settings.relays)
        events = {**counted.events, "relays_replaced": self.relays.replaced}
        return Report({"relay_udp_flows": flows}, events)

    def close(self) -> None:
        """End the relays, and so all relayed connections. New ones are rejected."""
        self._redirects.close()
        self.relays.close()
