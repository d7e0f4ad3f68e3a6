"""Leaves out and reports the frontends of Services that belong to programs of nodes or to the API server."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Protocol, format_address
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.endpoints import API_SERVER
from ebpfproxy.plan.protected_addresses import (
    Protected,
    is_checked,
    local_servers,
    protected,
    without_protected,
)
from ebpfproxy.plan.service_plan import Frontend, PlanContext, ServicePortPlan

log = Logger(__name__)

NOT_SERVED = "Service claims an address of a node or of the API server, not serving it"
"""Connections to a program of the node or to the API server would reach the Service. Logged once for each
frontend until the reason ends. `--protected-addresses=none` serves it."""

NOT_PERMITTED = "Service claims an address that its namespace may not have, not serving it"
"""See `--external-ip-cidrs`. Logged once for each frontend until the reason ends."""

SERVED_BY_PROGRAM = "A program of this node serves a ClusterIP"
"""For example NodeLocal DNSCache. Connections of this node and its pods to the ClusterIP and port reach the
program, as with kube-proxy. Logged once for each frontend, until the program ends."""

_Protections = Mapping[Frontend, Protected]


class RejectedClaim(NamedTuple):
    """A frontend of a Service that is not served."""

    service: NamespacedName
    frontend: Frontend
    why: Protected


class ProtectedClaims:
    """What is protected changes without the Service: programs start and end, and addresses are added."""

    def __init__(self, context: PlanContext) -> None:
        self._context = context
        self._claiming: dict[NamespacedName, tuple[ServicePortPlan, ...]] = {}  # plans with such frontends
        self._reported: dict[NamespacedName, _Protections] = {}
        self._rejected: list[RejectedClaim] = []
        self._input: tuple[object, ...] = ()
        self._local_servers: frozenset[tuple[Address, int, Protocol]] = frozenset()

    def take_rejected(self) -> list[RejectedClaim]:
        """Return the claims that were rejected since the last call, without ClusterIPs of local servers."""
        taken, self._rejected = self._rejected, []
        return taken

    @property
    def count(self) -> int:
        """The number of frontends that are not served now, without ClusterIPs of local servers."""
        return sum(
            why is not Protected.OF_LOCAL_SERVER
            for found in self._reported.values()
            for why in found.values()
        )

    def outdated(self, state: ClusterState) -> list[NamespacedName]:
        """Return the Services of which other frontends are protected than at the last plan."""
        current = (
            *(state.listening, state.local_networks, state.node_addresses, state.api_servers),
            state.slices_of(API_SERVER),
        )
        if list(map(id, current)) == list(map(id, self._input)):
            return []
        self._input = current
        names = [
            name
            for name, plans in self._claiming.items()
            if self._protected(plans, state) != self._reported.get(name, {})
        ]
        return names + [each for each in self._of_local_servers(state) if each not in names]

    def _of_local_servers(self, state: ClusterState) -> list[NamespacedName]:
        """Return the Services with a ClusterIP at which a program has begun or ceased to listen."""
        previous, self._local_servers = self._local_servers, local_servers(state)
        changed = {address for address, _, _ in previous ^ self._local_servers}
        if not changed:
            return []
        return [name for name, each in state.services.items() if not changed.isdisjoint(each.cluster_ips)]

    def without_protected(
        self, name: NamespacedName, plans: tuple[ServicePortPlan, ...], state: ClusterState
    ) -> tuple[ServicePortPlan, ...]:
        """Return the plans of one Service without protected frontends, and report these."""
        found = self._protected(plans, state)
        claiming = tuple(each for each in plans if is_checked(each))
        if not claiming and not found:
            self._claiming.pop(name, None)
            self._reported.pop(name, None)
            return plans
        self._claiming[name] = plans
        self._report(name, found)
        return tuple(without_protected(each, state, self._context) for each in plans)

    def _protected(self, plans: Iterable[ServicePortPlan], state: ClusterState) -> dict[Frontend, Protected]:
        return {
            frontend: why for plan in plans for frontend, why in protected(plan, state, self._context).items()
        }

    def _report(self, name: NamespacedName, found: _Protections) -> None:
        previous = self._reported.pop(name, {})
        if found:
            self._reported[name] = found
        for frontend, why in found.items():
            if previous.get(frontend) is why:
                continue
            values = {
                "service": str(name),
                "address": format_address(frontend.address),
                "port": f"{frontend.port}/{frontend.protocol.name}",
            }
            if why is Protected.OF_LOCAL_SERVER:
                log.info(SERVED_BY_PROGRAM, **values)
                continue
            self._rejected.append(RejectedClaim(name, frontend, why))
            if why is Protected.OUTSIDE_NETWORKS:
                hint = "remove the address from the Service, or permit it by --external-ip-cidrs"
                log.warning(NOT_PERMITTED, **values, hint=hint)
                continue
            hint = "remove the address from the Service, or set --protected-addresses=none"
            log.warning(NOT_SERVED, **values, reason=why.meaning, hint=hint)
