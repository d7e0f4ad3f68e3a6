"""The entries that a mode should have in the kernel, computed as the agent does."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from ebpfproxy.agent.reconciler import Reconciler
from ebpfproxy.backends.interface import Backend
from ebpfproxy.backends.mode import Inspection
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.plan.service_plan import NodePlan, PlanKey, ServicePortPlan


class Desired(NamedTuple):
    """The entries of a mode, and the plans that they were rendered from."""

    entries: Mapping[Any, Any]
    plans: Mapping[PlanKey, ServicePortPlan]
    node: NodePlan | None


def desired(state: ClusterState, inspection: Inspection) -> Desired:
    """Plan and render everything. The kernel determines only which pods bypass the socket hooks."""
    backend = cast(Backend[Any, Any], inspection)  # planning only calls `render`
    reconciler: Reconciler[Any, Any] = Reconciler(backend, inspection.context)
    state = dataclasses.replace(state, bypassing=inspection.bypassing())
    reconciler.plan(state, frozenset(state.services), node_changed=True, host_changed=True)
    return Desired(reconciler.desired, reconciler.plans, reconciler.node_plan)
