"""Stale UDP flows: which conntrack entries the kernel's NAT must not continue to use.

A UDP client that keeps sending keeps its conntrack entry, and so its endpoint, forever. The endpoint may be a
Pod that was removed, or another Pod that got the same address. If there was no endpoint when the flow began,
the flow is not translated at all (kubernetes issues 19029, 42473, 139628). Staleness is computed from the
conntrack entry and the plans in force, never from a history of events (issues 112604, 126130). So an error
loses nothing, and a start of the agent ends no correct flow (issue 122740).

- Only UDP flows can be stale. TCP connections end by themselves, and SCTP has state at both ends.
- A flow to a frontend is correct if it goes to one of the plan's endpoints, port included. Those are all
  endpoints that serve; which of them policies would select now does not matter. Every other flow to a
  frontend is stale: to another address, to a frontend without endpoints, or not translated.
- A flow to a removed frontend is stale if it is translated. A conntrack entry does not show which program
  made it: a container's published port, a hostPort, a DNS interceptor or another proxy may also translate.
  So only frontends count that this agent has had since its start, or that the rules of a previous run had
  at the start (`inherit`). They count until one search has ended their flows, since no rule creates such
  flows any more. If a Service and its rules were deleted between two runs, its flows stay until they time
  out.
- A NodePort counts only on addresses that accept it: not on other addresses of this node, nor in flows that
  are forwarded to a NodePort of another node (kube-proxy compares only the port).
- In a conntrack zone of another program (Open vSwitch, a VRF), a second entry may exist for the same packets
  and is legitimately not translated. In such a zone only translated flows can be stale.

The rules are those of pkg/proxy/conntrack/cleanup.go of Kubernetes with the corrections of pull requests
139629 and 141371, and with the comparison of the endpoint's port.
"""

import typing
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import (
    Family,
    Network,
    Protocol,
    family,
    is_unspecified,
    network_family,
    unspecified,
)
from ebpfproxy.plan.endpoints import EndpointAddress
from ebpfproxy.plan.node_ports import NodePortAddresses
from ebpfproxy.plan.service_plan import Frontend, PlanKey, ServicePortPlan
from ebpfproxy.plan.tracked_connection import FrontendAddress, TrackedConnection


class TrackedFlow(TrackedConnection, typing.Protocol):
    """A conntrack entry."""

    @property
    def protocol(self) -> int: ...
    @property
    def is_dnated(self) -> bool: ...
    @property
    def zone(self) -> int: ...


class _UdpPlan(NamedTuple):
    frontends: frozenset[FrontendAddress]
    endpoints: frozenset[EndpointAddress]


_NO_ENDPOINTS: frozenset[EndpointAddress] = frozenset()


class StaleFlows:
    """The UDP frontends and endpoints of the plans in force, updated plan by plan.

    A plan is first expected, then in force. The caller calls `expect` before it writes the rules of the plan:
    from then on a flow to an endpoint of the plan may exist and is not stale. The caller calls `in_force`
    after it has written the rules: from then on flows that do not match the plan are stale. The cost of a
    call depends on the number of changed plans.
    """

    def __init__(self) -> None:
        self._plans: dict[PlanKey, _UdpPlan] = {}
        self._owners: dict[FrontendAddress, PlanKey] = {}
        self._removed: set[FrontendAddress] = set()
        self._expected: dict[PlanKey, _UdpPlan | None] = {}
        self._expected_endpoints: dict[FrontendAddress, frozenset[EndpointAddress]] = {}
        self._node_ports = NodePortAddresses()
        self._expected_node_ports: frozenset[Network] | None = None

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None]) -> None:
        """Take in plans whose rules are about to be written, None for a deleted one. Only UDP plans count.

        It may be called several times before `in_force`, for example after a failed sync.
        """
        for key, plan in changed.items():
            if key[0].protocol is Protocol.UDP:
                udp_plan = _udp_plan(plan) if plan else None
                self._expected[key] = udp_plan
                self._expect_endpoints(udp_plan)

    def expect_node_ports(self, networks: frozenset[Network]) -> None:
        """Take in `NodePlan.node_port_networks`, which is about to be written. Initially it is empty."""
        self._expected_node_ports = networks

    def in_force(self, rejected: Collection[PlanKey] = ()) -> frozenset[Family]:
        """Put the expected plans in force, except those that the kernel `rejected`, which remain expected.

        Return the families in which more flows may be stale than before. Empty if endpoints were only added
        to existing ones, or if only policies changed.
        """
        arrived = {key: self._expected[key] for key in self._expected if key not in rejected}
        families = {
            key[1] for key, udp_plan in arrived.items() if _may_make_stale(self._plans.get(key), udp_plan)
        }
        for key in arrived:
            self._remove(key)
        for key, udp_plan in arrived.items():
            if udp_plan:
                self._add(key, udp_plan)
        self._expected = {key: self._expected[key] for key in self._expected if key in rejected}
        self._expected_endpoints = {}
        for udp_plan in self._expected.values():
            self._expect_endpoints(udp_plan)
        families |= self._replace_node_ports()
        families |= {family(address) for address, _ in self._removed}
        return frozenset(families)

    def inherit(self, frontends: Iterable[Frontend]) -> None:
        """Take in the frontends in the kernel's rules that a previous run left. Call it before `in_force`.

        Frontends that no plan has at the first `in_force` count as removed.
        """
        self._removed |= {(each.address, each.port) for each in frontends if each.protocol is Protocol.UDP}

    def forget_gone(self, ip_family: Family) -> None:
        """Forget the removed frontends of a family after a search has ended all their flows.

        Call it only if `in_force` was not called during the search. A frontend that is expected back is kept:
        its flows are not stale now. They are stale again if the sync fails and the next plan lacks it.
        """
        self._removed = {
            frontend
            for frontend in self._removed
            if family(frontend[0]) is not ip_family or frontend in self._expected_endpoints
        }

    def is_stale(self, flow: TrackedFlow) -> bool:
        """Return whether the flow must be ended, so that the plans in force apply to its next packet."""
        if flow.protocol != Protocol.UDP:
            return False
        frontends = self._frontends(flow)
        endpoint = flow.reply_source, flow.reply_source_port
        if any(endpoint in self._expected_endpoints.get(each, _NO_ENDPOINTS) for each in frontends):
            return False
        for frontend in frontends:
            if owner := self._owners.get(frontend):
                return endpoint not in self._plans[owner].endpoints and (flow.is_dnated or not flow.zone)
        return flow.is_dnated and not self._removed.isdisjoint(frontends)

    def _frontends(self, flow: TrackedFlow) -> tuple[FrontendAddress, ...]:
        """Return the frontends to which the flow may belong: the exact address before the NodePort."""
        address, port = flow.destination, flow.destination_port
        node_port = unspecified(family(address)), port
        is_known = (
            node_port in self._owners or node_port in self._removed or node_port in self._expected_endpoints
        )
        if is_known and address in self._node_ports:
            return (address, port), node_port
        return ((address, port),)

    def _expect_endpoints(self, udp_plan: _UdpPlan | None) -> None:
        if udp_plan:
            for frontend in udp_plan.frontends:
                endpoints = self._expected_endpoints.get(frontend, _NO_ENDPOINTS)
                self._expected_endpoints[frontend] = endpoints | udp_plan.endpoints

    def _remove(self, key: PlanKey) -> None:
        previous = self._plans.pop(key, None)
        for frontend in previous.frontends if previous else ():
            if self._owners.get(frontend) == key:
                del self._owners[frontend]
                self._removed.add(frontend)

    def _add(self, key: PlanKey, udp_plan: _UdpPlan) -> None:
        self._plans[key] = udp_plan
        self._removed -= udp_plan.frontends
        self._owners.update(dict.fromkeys(udp_plan.frontends, key))

    def _replace_node_ports(self) -> set[Family]:
        """Put the expected networks in force. Return the families in which NodePorts get more addresses."""
        networks, self._expected_node_ports = self._expected_node_ports, None
        if networks is None or networks == self._node_ports.networks:
            return set()
        extended = {network_family(net) for net in networks - self._node_ports.networks}
        self._node_ports = NodePortAddresses(networks)
        return {family(address) for address, _ in self._owners if is_unspecified(address)} & extended


def _udp_plan(plan: ServicePortPlan) -> _UdpPlan:
    return _UdpPlan(
        frozenset((each.frontend.address, each.frontend.port) for each in plan.frontends),
        frozenset((endpoint.address, endpoint.port) for endpoint in plan.endpoints),
    )


def _may_make_stale(old: _UdpPlan | None, new: _UdpPlan | None) -> bool:
    """Return whether a flow can become stale when `new` replaces `old`."""
    if old is None or new is None:
        return old is not new
    # Flows that began without an endpoint are not translated, and the first endpoint makes them stale.
    has_first_endpoint = bool(new.endpoints) and not old.endpoints
    return old.frontends != new.frontends or not old.endpoints <= new.endpoints or has_first_endpoint
