"""Network namespaces: which of them are pods of this node, and whose sockets the socket path serves.

The socket path connects a socket to an endpoint. That is only right if the endpoint is reachable from the
socket's namespace as the frontend is. Without these facts, the packet path serves the namespace, which is
right for everybody.
"""

from collections.abc import Collection

from ebpfproxy.model.address import Network, contains
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.namespace import Link, Namespace, NamespaceClass
from ebpfproxy.plan.service_plan import PlanContext, SocketLb


def classify(namespace: Namespace, pod_networks: Collection[Network]) -> tuple[NamespaceClass, str]:
    """Return the class of a namespace that is not the node's, and the reason.

    `pod_networks`: spec.podCIDRs of this node.

    The namespaces of another cluster in a pod, or in a container of this machine, are linked with the
    namespace of that pod or container. They may have the same addresses and cgroups of the same names.
    """
    if namespace.link is Link.ELSEWHERE:
        return NamespaceClass.OTHER, "a device leads to another network namespace than the node's"
    has_address = namespace.link is Link.NODE and any(
        contains(network, address) for network in pod_networks for address in namespace.addresses
    )
    if not namespace.pod and not has_address:
        return NamespaceClass.OTHER, "neither in a pod's cgroup nor with an address of the Node's podCIDRs"
    identity = f"cgroup of pod {namespace.pod}" if namespace.pod else "address of the Node's podCIDRs"
    if len(namespace.up) != 1:
        return NamespaceClass.PACKET_PATH, f"{identity}; {len(namespace.up)} devices are up, not 1"
    if namespace.special:
        return NamespaceClass.PACKET_PATH, f"{identity}; {', '.join(namespace.special)}"
    return NamespaceClass.SOCKET_PATH, f"{identity}; only {namespace.up[0]} is up, without rules of its own"


def by_socket(state: ClusterState, context: PlanContext) -> tuple[Namespace, ...]:
    """Return the pods' namespaces whose sockets the socket path serves."""
    if context.socket_lb is not SocketLb.ON:
        return ()
    networks = state.node.pod_cidrs if state.node else ()
    return tuple(
        each for each in state.namespaces if classify(each, networks)[0] is NamespaceClass.SOCKET_PATH
    )
