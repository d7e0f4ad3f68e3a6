"""Which tracked UDP flows no plan wants, where the kernel's own NAT serves (conntrack).

A client that keeps sending keeps its entry, and so its endpoint, for ever: to a Pod that is gone, to one
that has got that Pod's address since, or to no Pod, where there was no endpoint when it began (kubernetes
issues 19029, 42473, 139628). What is stale follows from the kernel's entry and the plans in force, never from
a history of events (issues 112604, 126130), so that nothing is lost by an error, and a start ends no flow
that is right (issue 122740).

- UDP only. A TCP connection ends by itself, and SCTP's has a state at both ends.
- A flow to a frontend is right where it continues to one of the plan's endpoints, port included: those are
  all that serve. Which of them policies would choose now is of no matter. All else is stale: where the
  endpoint went, where there is none left, where nothing was translated.
- A flow to a frontend that is gone is stale if it was translated. Who else translates? A container's
  published port, a hostPort, a DNS interceptor, another proxy: an entry does not tell whose it is. So only
  frontends count that we had ourselves since the start, or that the rules of an earlier run had when this one
  began (`inherit`); and these only until one look has ended their flows, since no mode makes such any more.
  A flow of a Service that was deleted between two runs, rules included, stays until it falls silent.
- A NodePort is meant only where it answers: not on other addresses of this node, nor in what passes through
  to another node's (kube-proxy compares the port alone).
- In a conntrack zone of others (Open vSwitch, a VRF) an entry beside ours may stand for the same
  packets, and is not translated rightly. There only translated flows count.

The rules are those of pkg/proxy/conntrack/cleanup.go of Kubernetes, with what pull requests 139629 and 141371
mend in them, and the port.
"""

import typing
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    Protocol,
    contains,
    family,
    is_unspecified,
    network_family,
    unspecified,
)
from ebpfproxy.plan.service_plan import Frontend, PlanKey, ServicePortPlan

Netns = tuple[Address, int]
"""Address and port of a frontend; of a NodePort, as there, the unspecified address."""

Target = tuple[Address, int]
"""Address and port of an endpoint."""

_SINGLE = 128


class TrackedFlow(typing.Protocol):
    """What has to be known of a flow: where the client sent it, and who answers."""

    @property
    def protocol(self) -> int: ...
    @property
    def destination(self) -> Address: ...
    @property
    def destination_port(self) -> int: ...
    @property
    def reply_source(self) -> Address: ...
    @property
    def reply_source_port(self) -> int: ...
    @property
    def is_dnated(self) -> bool: ...
    @property
    def zone(self) -> int: ...


class _Served(NamedTuple):
    places: frozenset[Netns]
    targets: frozenset[Target]


_NOTHING: frozenset[Target] = frozenset()


class StaleFlows:
    """What the plans in force say of UDP flows; kept up to date plan by plan.

    A plan is expected before its rules are brought into the kernel: from then on a flow to one of its
    endpoints may be there, and is not stale. It is in force, and ends what it does not want, once the caller
    says that the rules are. All costs are those of what changed.
    """

    def __init__(self) -> None:
        self._plans: dict[PlanKey, _Served] = {}
        self._owners: dict[Netns, PlanKey] = {}
        self._gone: set[Netns] = set()
        self._expected: dict[PlanKey, _Served | None] = {}
        self._allowed: dict[Netns, frozenset[Target]] = {}
        self._local: frozenset[Network] = frozenset()
        self._local_expected: frozenset[Network] | None = None
        self._local_singles: frozenset[Address] = frozenset()
        self._local_ranges: tuple[Network, ...] = ()

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None]) -> None:
        """These plans are about to come into force, None for one that goes; what is not UDP is left out.

        May be called again before `in_force` is, as after a sync that failed.
        """
        for key, plan in changed.items():
            if key[0].protocol is Protocol.UDP:
                served = _served(plan) if plan else None
                self._expected[key] = served
                self._allow(served)

    def expect_node_ports(self, networks: frozenset[Network]) -> None:
        """NodePorts are about to answer here: `NodePlan.node_port_networks`; before, they do nowhere."""
        self._local_expected = networks

    def in_force(self, rejected: Collection[PlanKey] = ()) -> frozenset[Family]:
        """What was expected is in the kernel, but for plans that it `rejected`: these are expected further.

        Returns the families in which flows may be stale now that were not before. Empty where endpoints were
        added to others, or only policies changed.
        """
        arrived = {key: self._expected[key] for key in self._expected if key not in rejected}
        look = {key[1] for key, served in arrived.items() if _strands(self._plans.get(key), served)}
        for key in arrived:
            self._withdraw(key)
        for key, served in arrived.items():
            if served:
                self._serve(key, served)
        self._expected = {key: self._expected[key] for key in self._expected if key in rejected}
        self._allowed = {}
        for served in self._expected.values():
            self._allow(served)
        look |= self._move_node_ports()
        look |= {family(address) for address, _ in self._gone}
        return frozenset(look)

    def inherit(self, frontends: Iterable[Frontend]) -> None:
        """What the rules in the kernel serve that an earlier run left; before the first `in_force`.

        Those that no plan has by then are treated as gone since the start.
        """
        places = {(each.address, each.port) for each in frontends if each.protocol is Protocol.UDP}
        self._gone |= places

    def forget_gone(self, of: Family) -> None:
        """No stale flow of this family to a frontend that is gone is left; nothing came into force meanwhile.

        Not forgotten is a frontend that is expected back: its flows are not stale yet, and are again if it
        does not come, as where the sync fails and the next one is to be without it.
        """
        self._gone = {place for place in self._gone if family(place[0]) is not of or place in self._allowed}

    def is_stale(self, flow: TrackedFlow) -> bool:
        """Whether the flow is to be ended, so that its next packet is treated as the plans in force say."""
        if flow.protocol != Protocol.UDP:
            return False
        places = self._places(flow)
        target = flow.reply_source, flow.reply_source_port
        if any(target in self._allowed.get(place, _NOTHING) for place in places):
            return False
        for place in places:
            if owner := self._owners.get(place):
                return target not in self._plans[owner].targets and (flow.is_dnated or not flow.zone)
        return flow.is_dnated and not self._gone.isdisjoint(places)

    def _places(self, flow: TrackedFlow) -> tuple[Netns, ...]:
        """The frontends by which the flow may have been served, the likelier first."""
        address, port = flow.destination, flow.destination_port
        node_port = unspecified(family(address)), port
        known = node_port in self._owners or node_port in self._gone or node_port in self._allowed
        if known and self._answers_node_ports(address):
            return (address, port), node_port
        return ((address, port),)

    def _answers_node_ports(self, address: Address) -> bool:
        return address in self._local_singles or any(contains(net, address) for net in self._local_ranges)

    def _allow(self, served: _Served | None) -> None:
        if served:
            for place in served.places:
                self._allowed[place] = self._allowed.get(place, _NOTHING) | served.targets

    def _withdraw(self, key: PlanKey) -> None:
        previous = self._plans.pop(key, None)
        for place in previous.places if previous else ():
            if self._owners.get(place) == key:
                del self._owners[place]
                self._gone.add(place)

    def _serve(self, key: PlanKey, served: _Served) -> None:
        self._plans[key] = served
        self._gone -= served.places
        self._owners.update(dict.fromkeys(served.places, key))

    def _move_node_ports(self) -> set[Family]:
        """NodePorts answer where they were expected to; the families that have them on more addresses now."""
        networks, self._local_expected = self._local_expected, None
        if networks is None or networks == self._local:
            return set()
        more = {network_family(net) for net in networks - self._local}
        self._local = networks
        self._local_singles = frozenset(net.address for net in networks if net.length == _SINGLE)
        self._local_ranges = tuple(net for net in networks if net.length != _SINGLE)
        return {family(address) for address, _ in self._owners if is_unspecified(address)} & more


def _served(plan: ServicePortPlan) -> _Served:
    return _Served(
        frozenset((each.frontend.address, each.frontend.port) for each in plan.frontends),
        frozenset((endpoint.address, endpoint.port) for endpoint in plan.endpoints),
    )


def _strands(old: _Served | None, new: _Served | None) -> bool:
    """Whether a flow can have become stale by the step from one to the other."""
    if old is None or new is None:
        return old is not new
    begins = bool(new.targets) and not old.targets  # what was not translated now can be
    return old.places != new.places or not old.targets <= new.targets or begins
