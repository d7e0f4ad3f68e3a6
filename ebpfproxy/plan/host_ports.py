"""Host ports: hostPort of a container, as the CNI plugin portmap serves it, for networks without portmap.

Each host port is planned like a NodePort with externalTrafficPolicy Local whose only endpoint is the pod, so
clients from outside keep their address. With hostIP it is planned like an external IP, as long as the address
is one of this node. The API accepts any: with the plugin portmap, a pod with the hostIP of another server
gets the connections of this node to that server.

A Service keeps a frontend that a pod claims, too (`claims.py`).
"""

import hashlib
from collections.abc import Collection

from ebpfproxy.model.address import Address, Network, contains, family, is_unspecified, unspecified
from ebpfproxy.model.node import Node
from ebpfproxy.model.pod import HostPort, Pod
from ebpfproxy.model.service import NamespacedName, ServicePortName
from ebpfproxy.plan.local_traffic import has_detector, local_traffic
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    NoEndpointAction,
    PlanContext,
    PlannedEndpoint,
    PlannedEndpoints,
    ServicePortPlan,
)
from ebpfproxy.plan.traffic_policy import local_policy_results

_PREFIX = "pod/"
_LONGEST = 63
"""The length of a Service's name. Kernel objects have room for it; the name of a pod may be longer."""


def name_of(pod: NamespacedName) -> NamespacedName:
    """Return the name under which the host ports of a pod are planned. No Service can have it.

    >>> str(name_of(NamespacedName("default", "web-0")))
    'default/pod/web-0'
    """
    name = _PREFIX + pod.name
    if len(name) > _LONGEST:
        digest = hashlib.sha256(pod.name.encode()).hexdigest()[:8]
        name = f"{name[: _LONGEST - 9]}-{digest}"
    return NamespacedName(pod.namespace, name)


def is_host_port(name: ServicePortName) -> bool:
    """Return whether a plan of this name is that of a host port."""
    return name.name.startswith(_PREFIX)


def has_host_address(pod: Pod) -> bool:
    """Return whether the plans of a pod depend on the addresses of the node."""
    return any(each.host_address is not None for each in pod.host_ports)


def elsewhere(pod: Pod, local: Collection[Network]) -> tuple[HostPort, ...]:
    """Return the host ports at addresses that are not of this node, so they are not served."""
    return tuple(each for each in pod.host_ports if not _is_here(each.host_address, local))


def plan_host_ports(
    pod: Pod, node: Node | None, local: Collection[Network], context: PlanContext
) -> tuple[ServicePortPlan, ...]:
    """Return a plan for each host port in each family of the pod, sorted by name and family.

    `local`: `ClusterState.local_networks`.
    """
    plans = [
        _plan(pod, address, each, node, context)
        for address in pod.addresses
        for each in pod.host_ports
        if each.host_address is None or family(each.host_address) is family(address)
        if _is_here(each.host_address, local)
    ]
    return tuple(sorted(plans, key=lambda plan: (plan.name, plan.family.value)))


def _is_here(address: Address | None, local: Collection[Network]) -> bool:
    return address is None or is_unspecified(address) or any(contains(each, address) for each in local)


def _plan(
    pod: Pod, address: Address, port: HostPort, node: Node | None, context: PlanContext
) -> ServicePortPlan:
    ip_family = family(address)
    at = port.host_address or unspecified(ip_family)
    kind = FrontendKind.NODE_PORT if is_unspecified(at) else FrontendKind.EXTERNAL_IP
    frontend = Frontend(at, port.host_port, port.protocol)
    results = local_policy_results(has_detector(context, ip_family, node))
    endpoint = PlannedEndpoint(address, port.container_port, cluster=True, local=True, on_node=True)
    return ServicePortPlan(
        _port_name(pod, port),
        ip_family,
        (FrontendPlan(frontend, kind, *results),),
        PlannedEndpoints([endpoint]),
        NoEndpointAction.DROP,  # as for every plan with a usable endpoint
        local_traffic=local_traffic(context, ip_family, node),
    )


def _port_name(pod: Pod, port: HostPort) -> ServicePortName:
    """A pod may have a port at several host addresses. Their names end with a number then."""
    same = [each for each in pod.host_ports if each[1:3] == port[1:3]]
    suffix = f"-{same.index(port)}" if len(same) > 1 else ""
    return ServicePortName(*name_of(pod.name), f"hostport-{port.host_port}{suffix}", port.protocol)
