"""Every cluster can be planned: broken objects through parse, tracker, plan and render.

A short run; `make fuzz` makes it a long one by --junk.
"""

import struct
from socket import htons

import pytest

from ebpfproxy.api.event import AddressesChanged, Event
from ebpfproxy.api.parse import parse_node, parse_service, parse_slice
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.backends.ebpf import abi, entries
from ebpfproxy.backends.ebpf.entries import Entry, Key, ServicePortEntry
from ebpfproxy.backends.ebpf.hooks import SOCKET_HOOKS
from ebpfproxy.model.address import Network, parse_network
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.claims import Claims
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.node_plan import plan_node
from ebpfproxy.plan.planned_endpoints import ROW
from ebpfproxy.plan.service_plan import PlanContext, ServicePortPlan
from tests.support.junk import junk_objects

CONTEXT = PlanContext(node_name="here", node_port_primary=True)
PARSERS = {"Service": parse_service, "EndpointSlice": parse_slice, "Node": parse_node}
LOCAL = frozenset(map(parse_network, ("127.0.0.0/8", "192.0.2.10/32", "::1/128")))
BATCH = 50


class Planner:
    """Plans only what changed, as the agent does."""

    def __init__(self) -> None:
        self.tracker = Tracker(started=0.0)
        self.claims = Claims()
        self.state = ClusterState({}, {})
        self.fold(AddressesChanged(LOCAL))

    def fold(self, event: Event) -> None:
        self.tracker.fold(event)

    def sync(self) -> dict[Key, Entry]:
        """Return the entries of what changed."""
        drained = self.tracker.drain()
        self.state = drained.state
        names = drained.services | (self.state.services.keys() if drained.node_changed else frozenset())
        changed: list[ServicePortPlan] = []
        for name in names:
            changed += self.claims.update(name, plans_of(self.state, name)).plans
        node = None
        if drained.node_changed or drained.host_changed:
            node = plan_node(self.state, CONTEXT, pods=False)
        return entries.render(changed, node, SOCKET_HOOKS)


def plans_of(state: ClusterState, name: NamespacedName) -> tuple[ServicePortPlan, ...]:
    service = state.services.get(name)
    if service is None:
        return ()
    return tuple(plan_service(service, state.slices_of(service.name), state.node, CONTEXT))


def check(entry: Entry | None, key: Key) -> None:
    """Check that an entry fits the map layouts. Raises struct.error, OverflowError or AssertionError."""
    if isinstance(key, Network):
        abi.NETWORK_KEY.pack(key.length, key.address)
    if not isinstance(entry, ServicePortEntry):
        return
    targets = entry.endpoints.targets()
    assert targets == sorted(set(targets))
    assert entry.frontends == tuple(sorted(set(entry.frontends)))
    for address, port, protocol, kind, flags in entry.frontends:
        assert port
        abi.SERVICE_KEY.pack(address, htons(port), protocol, 0)
        abi.SERVICE.pack(bytes(8), bytes(8), 1, entry.affinity_timeout, flags, kind, 0, 0)
    for address, port, flags in ROW.iter_unpack(entry.endpoints.rows):
        assert port
        abi.ENDPOINT.pack(address, port, flags, 1)


def test_with_broken_objects_replanning_changed_services_equals_planning_all(
    request: pytest.FixtureRequest,
) -> None:
    planner, rendered = Planner(), 0
    for position, (kind, raw) in enumerate(junk_objects(seed=2, n=request.config.getoption("--junk")), 1):
        planner.fold(PARSERS[kind](raw))
        if position % BATCH:
            continue
        for key, entry in planner.sync().items():
            try:
                check(entry, key)
            except (struct.error, OverflowError) as failure:
                raise AssertionError(f"{key}: {entry!r}") from failure
            rendered += 1
    planner.sync()
    afresh = Claims()
    for name in sorted(planner.state.services, reverse=True):
        afresh.update(name, plans_of(planner.state, name))
    assert planner.claims.plans == afresh.plans
    assert planner.claims.conflicts == afresh.conflicts
    assert rendered > request.config.getoption("--junk") / 10
