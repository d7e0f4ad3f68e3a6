"""The plan of this node: what all Services share, such as NodePort addresses and devices."""

from collections.abc import Collection, Iterable

from ebpfproxy.model.address import Address, Family
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.namespace import Namespace
from ebpfproxy.plan.devices import flowtable_devices, plan_devices
from ebpfproxy.plan.direct_return import tunnel_sources
from ebpfproxy.plan.foreign_addresses import foreign_networks
from ebpfproxy.plan.local_traffic import local_traffic
from ebpfproxy.plan.namespaces import by_socket, is_of_pod, opted_out_by, source
from ebpfproxy.plan.node_ports import node_ports_everywhere, plan_node_ports
from ebpfproxy.plan.on_link import frontend_routes
from ebpfproxy.plan.service_plan import DeviceRole, NodePlan, PlanContext, PodNamespace


def plan_node(
    state: ClusterState,
    context: PlanContext,
    pods: bool,
    previous: NodePlan | None = None,
    of_node: bool = False,
    on_link: Collection[Address] = (),
) -> NodePlan:
    """Return the plan of this node.

    `pods`: whether any ServicePort needs the packets of pods (`needs_packets_of_pods`); `of_node`: those of
    the node (`needs_packets_of_node`). `on_link`: the addresses of frontends in on-link networks
    (`FrontendAddresses`). `previous`: the plan before this one. Loopback, and a pod's device, in
    `previous` keep their programs as long as they exist, since their established connections are translated
    there. Only a device that had them because its pod was unknown loses them, once the socket path serves
    the pod and no such connection is left.
    """
    served = by_socket(state, context)
    kept = _pod_devices(previous, state) if previous else frozenset()
    lasting = kept & previous.lasting if previous else frozenset()
    kept -= _outer(each for each in served if not each.in_flight) - lasting
    if previous and any(each.role is DeviceRole.LOOPBACK for each in previous.devices):
        of_node = True
    devices = plan_devices(
        state.devices,
        state.node,
        context,
        pods,
        state.bypassing | kept,
        of_node,
        _outer(served),
        _outer(each for each in state.namespaces if is_of_pod(each, state)),
    )
    lasting |= _outer(each for each in state.namespaces if opted_out_by(each, state))
    if pods:
        lasting = frozenset(each.ifindex for each in devices if each.role is DeviceRole.POD)
    return NodePlan(
        state.local_networks,
        plan_node_ports(state.local_networks, state.node, context),
        devices,
        node_ports_everywhere(context),
        {each: traffic for each in Family if (traffic := local_traffic(context, each, state.node))},
        tunnel_sources(state, context),
        state.service_cidrs,
        frozenset(
            PodNamespace(each.cookie, source(each, Family.IPV4), source(each, Family.IPV6)) for each in served
        ),
        lasting,
        frozenset(state.node.addresses if state.node else ()),
        foreign_networks(state),
        frontend_routes(on_link, devices, state),
        flowtable_devices(state.devices, context.flowtable_patterns),
    )


def _outer(namespaces: Iterable[Namespace]) -> frozenset[int]:
    return frozenset(ifindex for each in namespaces for ifindex in each.outer)


def _pod_devices(previous: NodePlan, state: ClusterState) -> frozenset[int]:
    """Return the ifindexes of pods' devices in `previous` that still exist.

    The name is compared, too, since the kernel may reuse an ifindex.
    """
    existing = {(each.ifindex, each.name) for each in state.devices}
    pods = (each for each in previous.devices if each.role is DeviceRole.POD)
    return frozenset(each.ifindex for each in pods if (each.ifindex, each.name) in existing)
