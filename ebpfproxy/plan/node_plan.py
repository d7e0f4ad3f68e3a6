"""What this node must do beside its Services: where NodePorts are answered, on which devices packets are."""

from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.plan.devices import plan_devices
from ebpfproxy.plan.node_ports import plan_node_ports
from ebpfproxy.plan.service_plan import NodePlan, PlanContext


def plan_node(state: ClusterState, context: PlanContext, pods: bool) -> NodePlan:
    """`pods`: whether the plan of any Service needs packets of pods (`needs_packets_of_pods`)."""
    return NodePlan(
        state.local_networks,
        plan_node_ports(state.local_networks, state.node, context),
        plan_devices(state.devices, state.node, context, pods, state.bypassing),
    )
