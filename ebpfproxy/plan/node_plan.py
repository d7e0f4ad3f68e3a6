"""What this node must do beside its Services: where NodePorts are answered, on which devices packets are."""

from ebpfproxy.model.address import Family
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.plan.devices import plan_devices
from ebpfproxy.plan.local_traffic import local_traffic
from ebpfproxy.plan.node_ports import node_ports_everywhere, plan_node_ports
from ebpfproxy.plan.service_plan import DeviceRole, NodePlan, PlanContext


def plan_node(
    state: ClusterState, context: PlanContext, pods: bool, previous: NodePlan | None = None
) -> NodePlan:
    """`pods`: whether the plan of any Service needs packets of pods (`needs_packets_of_pods`).

    `previous`: the plan before this one. A pod's device that is in it stays one as long as it exists: what
    was translated there continues only where it is translated.
    """
    kept = _kept(state, previous) if previous else frozenset()
    return NodePlan(
        state.local_networks,
        plan_node_ports(state.local_networks, state.node, context),
        plan_devices(state.devices, state.node, context, pods, state.bypassing | kept),
        node_ports_everywhere(context),
        {of: traffic for of in Family if (traffic := local_traffic(context, of, state.node))},
    )


def _kept(state: ClusterState, previous: NodePlan) -> frozenset[int]:
    """Devices of pods, by ifindex, that `previous` has. By name, too: an index may be given once more."""
    present = {(each.ifindex, each.name) for each in state.devices}
    pods = (each for each in previous.devices if each.role is DeviceRole.POD)
    return frozenset(each.ifindex for each in pods if (each.ifindex, each.name) in present)
